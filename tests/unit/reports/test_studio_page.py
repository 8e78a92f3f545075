"""The studio in Chromium, used as a person does; no request leaves the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mcore_mas.config.compose import resolve
from rollout.records.files import write_trajectories
from tests.support.browser import Browser, needs_chromium
from tests.support.played import failed, trajectory, turn
from tests.support.run_files import write_small_run
from tests.support.studio import serve_studio

pytestmark = needs_chromium
LISTED = "[...document.querySelectorAll('#list tr')].map(row => row.children[1].textContent).join()"
SET = "document.getElementById({0!r}).value = {1!r}; document.getElementById({0!r}).dispatchEvent(new Event({2!r})); 0"


def alone(number: int, agent: str):
    """Of task `t<number>`: a turn of one agent, whose reward is `number`."""
    return trajectory(
        replace(turn(0, agent), reward=float(number)), sample=number, task_id=f"t{number}"
    )


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    results = tmp_path / "results"
    write_small_run(results / "a", {"t": 0.5, "u": 0.25})
    write_small_run(results / "b", {"t": 1.0, "u": 0.75}, seed=2)
    for run in "ab":
        with (results / run / "train/metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "validation/x/accuracy": 0.5, "validation/y/accuracy": 0.25}\n')
            for agent in ("solver", "verifier"):
                file.write(json.dumps({"step": 2, f"agent/{agent}/reward_mean": 0.5}) + "\n")
    file = results / "a/train/trajectories/step_000002.parquet"
    lost = replace(failed(turn(0)), task_id="lost")
    write_trajectories(file, [alone(1, "solver"), alone(2, "verifier"), alone(3, "solver"), lost])
    with (
        serve_studio(results) as url,
        Browser(f"{url}/#a", tmp_path / "profile") as page,
    ):
        page.until(f"{LISTED} === 't1,t2,t3,lost'")
        yield page
        assert len(page.asked) > 8 and all(asked.startswith(f"{url}/") for asked in page.asked), (
            page.asked
        )


def test_a_turn_shows_what_it_was_compared_with_and_its_tokens_by_advantage(
    page: Browser, tmp_path: Path
) -> None:
    """The page in the frame, opened by itself: a frame without scripts cannot be asked."""
    values = resolve(["experiment=demo_math", "advantage={name: grpo}"])
    (tmp_path / "results/a/config.yaml").write_text(yaml.safe_dump(values))
    tokenizer = tmp_path / "results/a/train/models/p/tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(tokenizer))
    file = tmp_path / "results/a/train/trajectories/step_000003.parquet"
    write_trajectories(file, [replace(alone(number, "solver"), task_id="t") for number in (1, 3)])
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as journal:
        journal.write('{"step": 3, "reward/mean": 2.0}\n')
    page.until(f"{LISTED} === 't,t'")
    shown = page.until("document.getElementById('conversation').getAttribute('src').includes('step_000003')"
                       " && document.getElementById('conversation').src")  # fmt: skip
    page.send("Page.navigate", url=shown)
    summary = page.until("document.querySelector('.peers summary')?.textContent")
    assert summary == "peers: 2 votes, mean 2, σ 1.414, of turns alike in task"  # rewards 1 and 3
    assert not page.value("document.querySelector('.peers table').checkVisibility()")
    page.value("document.querySelector('.peers summary').click()")
    page.until("document.querySelector('.peers table').checkVisibility()")
    rows = page.value(
        "[...document.querySelectorAll('.peers tr')].map(row => row.innerText.split('\\t').join(' '))"
    )
    heading = "sample turn agent reward vote advantage"
    assert rows == [heading, "1 0 solver 1 1 -0.707", "3 0 solver 3 3 +0.707"]  # 1 over 1.414

    shade = "getComputedStyle(document.querySelector('.reply span')).backgroundColor"
    assert page.value(shade) == "color(srgb 0 0 0 / 0)"  # the tokens were certain
    page.value("document.getElementById('by_advantage').click()")
    assert (
        page.value(shade) == "color(srgb 0.627451 0.227451 0.0705882 / 0.45)"
    )  # --down, as far as it goes


HUES = """Object.fromEntries([...document.querySelectorAll('figure')].map(figure => [
  figure.querySelector('b').textContent, [...figure.querySelectorAll('span:has(i)')].map(
    one => one.innerText.split(' ')[0] + ' ' + one.querySelector('i').style.background).sort()]))"""


def test_an_agent_has_one_colour_in_all_charts(page: Browser, tmp_path: Path) -> None:
    """Also if metrics come in another order, behind data sources, or of one agent alone."""
    rows = [("verifier", "entropy"), ("solver", "entropy"), ("verifier", "kl")]
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as journal:
        journal.write(
            json.dumps({"step": 3} | {f"agent/{agent}/{name}": 0.5 for agent, name in rows}) + "\n"
        )
    page.until(f"'agent/*/kl' in {HUES}")
    both = ["solver var(--c0)", "verifier var(--c1)"]
    found = page.value(HUES)
    assert [found[f"agent/*/{name}"] for name in ("reward_mean", "entropy", "kl")] == [
        both,
        both,
        both[1:],
    ]


def put(page: Browser, name: str, value: str, event: str = "input") -> None:
    page.value(SET.format(name, value, event))


def test_conversations_are_filtered_by_task_agent_reward_and_status(page: Browser) -> None:
    page.until(
        "[...document.getElementById('agent').options].map(o => o.value).join() === ',solver,verifier'"
    )
    for fields, left in (
        ({"text": "t2"}, "t2"),
        ({"text": "EngineErr"}, "lost"),
        ({"agent": "solver"}, "t1,t3,lost"),
        ({"agent": "solver", "status": "completed"}, "t1,t3"),
        ({"status": "failed"}, "lost"),
        ({"low": "2"}, "t2,t3"),
        ({"low": "1.5", "high": "2.5"}, "t2"),
        ({"low": "9"}, ""),
    ):
        for name, value in fields.items():
            put(page, name, value)
        page.until(f"{LISTED} === {left!r}")
        for name in fields:
            put(page, name, "")
        page.until(f"{LISTED} === 't1,t2,t3,lost'")
    page.value("document.querySelectorAll('#list tr')[2].click()")
    page.until("document.getElementById('conversation').src.endsWith('index=2')")


def test_two_runs_stand_side_by_side(page: Browser) -> None:
    dashes = "[...document.querySelectorAll('#charts polyline')].filter(line => line.style.strokeDasharray).length"
    assert page.value(dashes) == 0 and page.value("document.getElementById('differences').hidden")
    put(page, "other", "b", "change")
    page.until(
        f"{dashes} === 4"
    )  # reward/mean, validation/accuracy, and reward_mean of both agents
    rows = page.until(
        "[...document.querySelectorAll('#different tr')].map(row => row.innerText.split('\\t').join('|'))"
    )
    # differences of t and u are 0.5 each
    assert rows == [
        "|a|b|difference, with its 95 % interval",
        "seed|1|2|",
        "trained avg@2 (2 tasks)|0.375|0.875|0.5 [0.5, 0.5]",
    ]
    put(page, "other", "", "change")
    page.until(f"{dashes} === 0 && document.getElementById('differences').hidden")
