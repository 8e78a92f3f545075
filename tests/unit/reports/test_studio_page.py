"""The studio in Chromium, used as a person does; no request leaves the host."""

from __future__ import annotations

import json
import os
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
LISTED = (
    "[...document.querySelectorAll('#list tr')]"
    ".map(row => row.querySelector('small').textContent.split(' ')[0]).join()"
)
SET = "document.getElementById({0!r}).value = {1!r}; document.getElementById({0!r}).dispatchEvent(new Event({2!r})); 0"


def one_turn(number: int, agent: str):
    """Return a trajectory of task `t<number>` with one turn, whose reward is `number`."""
    return trajectory(
        replace(turn(0, agent), reward=float(number)), sample=number, task_id=f"t{number}"
    )


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    results = tmp_path / "results"
    agents: dict[str, object] = {"solver": {}, "verifier": {}}
    write_small_run(results / "a", {"t": 0.5, "u": 0.25}, agents=agents)
    write_small_run(results / "b", {"t": 1.0, "u": 0.75}, agents=agents, seed=2)
    for run in "ab":
        with (results / run / "train/metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "validation/x/accuracy": 0.5, "validation/y/accuracy": 0.25}\n')
            for agent in ("solver", "verifier"):
                file.write(json.dumps({"step": 2, f"agent/{agent}/reward_mean": 0.5}) + "\n")
    file = results / "a/train/trajectories/step_000002.parquet"
    lost = replace(failed(turn(0)), task_id="lost")
    write_trajectories(
        file, [one_turn(1, "solver"), one_turn(2, "verifier"), one_turn(3, "solver"), lost]
    )
    with (
        serve_studio(results) as url,
        Browser(f"{url}/#a", tmp_path / "profile") as page,
    ):
        page.until(f"{LISTED} === 't1,t2,t3,lost'")
        yield page
        assert len(page.requests) > 8 and all(
            request.startswith(f"{url}/") for request in page.requests
        ), page.requests


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
    write_trajectories(
        file, [replace(one_turn(number, "solver"), task_id="t") for number in (1, 3)]
    )
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


LEGENDS = """Object.fromEntries([...document.querySelectorAll('#charts figure')].map(figure => [
  figure.querySelector('figcaption span').title, [...figure.querySelectorAll('li')].map(
    entry => entry.querySelector('span').textContent + ' ' + entry.querySelector('i').style.borderColor)]))"""


def test_pages_of_a_filtered_list_are_the_same_on_the_way_back(
    page: Browser, tmp_path: Path
) -> None:
    """Every second of 500 trajectories passes the filter, so the pages have 100, 100 and 50 rows."""
    file = tmp_path / "results/a/train/trajectories/step_000002.parquet"
    agents = ("solver", "verifier")
    write_trajectories(file, [one_turn(number, agents[number % 2]) for number in range(500)])
    shown = "document.getElementById('range').textContent"
    page.value(SET.format("agent", "solver", "input"))
    pages = ["1–199 of 500", "201–399 of 500", "401–499 of 500"]
    page.until(f"{shown} === '{pages[0]}'")
    for button, expected in (
        ("later", pages[1]),
        ("later", pages[2]),
        ("earlier", pages[1]),
        ("earlier", pages[0]),
    ):
        page.value(f"document.getElementById('{button}').click()")
        page.until(f"{shown} === '{expected}'", seconds=20)
    assert page.value("document.getElementById('earlier').disabled")


def test_an_agent_has_one_colour_in_all_charts(page: Browser, tmp_path: Path) -> None:
    """Also if metrics come in another order, behind data sources, or of one agent alone."""
    rows = [("verifier", "entropy"), ("solver", "entropy"), ("verifier", "kl")]
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as journal:
        journal.write(
            json.dumps({"step": 3} | {f"agent/{agent}/{name}": 0.5 for agent, name in rows}) + "\n"
        )
    page.until(f"'agent/*/kl' in {LEGENDS}")
    both = ["solver var(--c0)", "verifier var(--c1)"]
    legends = page.value(LEGENDS)
    assert [legends[f"agent/*/{name}"] for name in ("reward_mean", "entropy", "kl")] == [
        both,
        both,
        both[1:],
    ]
    chip = "document.querySelector('#list tr:nth-child(2) .swatch').style.background"
    assert page.value(chip) == "var(--c1)"  # of the verifier, in the list
    page.until("document.getElementById('conversation').src")
    page.value("document.querySelectorAll('#list tr')[1].click()")
    shown = page.until("document.getElementById('conversation').src.endsWith('index=1')"
                       " && document.getElementById('conversation').src")  # fmt: skip
    page.send("Page.navigate", url=shown)
    article = "document.querySelector('article')?.getAttribute('style')"
    page.until(f"{article} === '--colour:var(--c1)'")


# Texts of a chart's axes and of its baseline, and the y of the points that its lines go through.
TICKS = """(name => [...charts.get(name).figure.querySelectorAll('.mark-text text')]
  .map(text => text.textContent))({!r})"""
PATHS = """(name => [...charts.get(name).figure.querySelectorAll('.mark-line.{} path')]
  .map(path => path.getAttribute('d').split(/[ML]/).slice(1).map(
    point => point.split(',').map(Number))))({!r})"""
HOVER = """(name => {{ const plot = charts.get(name).figure.querySelector('.plot');
  plot.onpointermove({{clientX: plot.getBoundingClientRect().{}, clientY: 300}});
  return document.getElementById('tooltip').innerText; }})({!r})"""


def drawn(page: Browser, name: str, points: int) -> None:
    """Wait until a chart is drawn with a number of points."""
    plot = f"charts.get({name!r})?.figure.querySelector('.plot').dataset.drawn"
    page.until(f"{plot} === '{points}'")


def test_charts_have_axes_units_and_a_tooltip(page: Browser) -> None:
    drawn(page, "validation/accuracy", 1)
    drawn(page, "reward/mean", 2)
    accuracy = page.value(TICKS.format("validation/accuracy"))
    # The only value is the untrained team's, 25 %: a dotted line and its label are drawn at it.
    assert {"24%", "26%"} <= set(accuracy)
    assert "untrained 25\xa0%" in accuracy and "training step" in accuracy
    reward = page.value(TICKS.format("reward/mean"))
    assert [text for text in reward if text in ("1", "2", "training step")] == [
        "1",
        "2",
        "training step",
    ]
    assert {"0.5", "0.6", "0.7"} <= set(reward)

    heading = "charts.get('{}').figure.querySelector('figcaption').innerText"
    assert page.value(heading.format("reward/mean")).split("\n") == [
        "Mean reward of a turn",
        "0.75",
    ]
    assert page.value(HOVER.format("left", "reward/mean")).split("\n") == [
        "step 1", "Mean reward of a turn", "0.5"]  # fmt: skip
    assert page.value(HOVER.format("right", "reward/mean")).split("\n")[0] == "step 2"
    assert page.value(HOVER.format("left", "validation/accuracy")).split("\n") == [
        "before training", "Validation accuracy", "25\xa0%"]  # fmt: skip
    page.value("charts.get('reward/mean').figure.querySelector('.plot').onpointerleave()")
    assert page.value("document.getElementById('tooltip').hidden")


def test_the_axis_of_an_accuracy_stays_within_its_range(page: Browser, tmp_path: Path) -> None:
    """Runs of earlier versions have intervals beyond 100 %."""
    ends = {"validation/ci_low": 0.6, "validation/ci_high": 1.4}
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as journal:
        journal.write(json.dumps({"step": 3, "validation/accuracy": 1.0, **ends}) + "\n")
    drawn(page, "validation/accuracy", 2)
    texts = page.value(TICKS.format("validation/accuracy"))
    percents = [int(text[:-1]) for text in texts if text.endswith("%") and text[:-1].isdigit()]
    assert (min(percents), max(percents)) == (20, 100)  # the untrained team has 25 %


def test_smoothing_is_a_mean_over_steps(page: Browser, tmp_path: Path) -> None:
    """The rewards 0.5, 0.75, 0, 0.25 have the means 0.5, 0.625, 0.375, 0.125 of two steps."""
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as journal:
        for step, reward in ((2, 0.0), (3, 0.25)):
            journal.write(json.dumps({"step": step, "reward/mean": reward}) + "\n")
    drawn(page, "reward/mean", 4)
    rows = "charts.get('reward/mean').values()"
    put(page, "smoothing", "1")
    page.until("document.getElementById('smoothing_text').textContent === 'mean of 2 steps'")
    assert page.until(
        f"{rows}.then(all => all.map(row => row.line).join() === '0.5,0.625,0.375,0.125')"
    )
    assert len(page.value(PATHS.format("raw_lines_line", "reward/mean"))) == 1  # a thin line too
    put(page, "smoothing", "0")
    page.until("document.getElementById('smoothing_text').textContent === 'off'")
    assert page.until(f"{rows}.then(all => all.map(row => row.line).join() === '0.5,0.75,0,0.25')")
    page.until(f"{PATHS.format('raw_lines_line', 'reward/mean')}.length === 0")


def test_overlapping_reads_and_a_resumed_training_draw_no_line_back(
    page: Browser, tmp_path: Path
) -> None:
    """Every step is drawn once, from left to right, whoever reads at the same time."""
    metrics = tmp_path / "results/a/train/metrics.jsonl"
    drawn(page, "reward/mean", 2)
    with metrics.open("a") as journal:
        for step in (3, 4):
            journal.write(json.dumps({"step": step, "reward/mean": 0.5}) + "\n")
    page.value("Promise.all([refresh(), refresh(), readNewRows(run), refresh()]).then(() => 1)")
    steps = "[...run.rows.keys()].join()"
    assert page.value(steps) == "-1,0,1,2,3,4"
    drawn(page, "reward/mean", 4)
    (line,) = page.value(PATHS.format("lines_line", "reward/mean"))
    xs = [x for x, _ in line]
    assert len(xs) == 4 and xs == sorted(set(xs))

    # A training that resumes at step 1 drops the rows after it, and takes the step again.
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:2]))
    page.until(f"{steps} === '-1,0'")
    with metrics.open("a") as journal:
        journal.write(json.dumps({"step": 1, "reward/mean": 0.125}) + "\n")
    page.until(f"{steps} === '-1,0,1' && run.rows.get(1)['reward/mean'] === 0.125")


def test_the_config_has_a_tab(page: Browser, tmp_path: Path) -> None:
    shown = "document.getElementById('settings').checkVisibility()"
    assert not page.value(shown)
    page.value("document.getElementById('tab_settings').click()")
    page.until("document.getElementById('config').textContent")
    assert page.value(shown) and not page.value(
        "document.getElementById('curves').checkVisibility()"
    )
    text = page.value("document.getElementById('config').textContent")
    assert text.strip() == (tmp_path / "results/a/config.yaml").read_text().strip()
    assert page.value("location.hash") == "#a/config"


def test_a_run_of_many_steps_is_drawn_through_means(page: Browser, tmp_path: Path) -> None:
    """1,200 steps with the rewards 0, 1, 2, ... are drawn as means of three: 1, 4, 7, ..."""
    with (tmp_path / "results/b/train/metrics.jsonl").open("w") as journal:
        for step in range(1200):
            journal.write(json.dumps({"step": step, "reward/mean": float(step)}) + "\n")
    page.value("chooseRun('b').then(() => 1)")
    drawn(page, "reward/mean", 400)
    values = page.value("charts.get('reward/mean').values()")
    assert [(row["x"], row["y"]) for row in values[:2]] == [(2, 1), (5, 4)]
    assert values[-1]["y"] == 1198


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
    dashes = "document.querySelectorAll('#charts .mark-line.lines_line path[stroke-dasharray=\"5,3\"]').length"
    drawn(page, "reward/mean", 2)
    assert page.value(dashes) == 0 and page.value("document.getElementById('differences').hidden")
    put(page, "other", "b", "change")
    # reward/mean, validation/accuracy, and reward_mean of both agents
    page.until(f"{dashes} === 4")
    legends = page.value(LEGENDS)
    assert legends["reward/mean"] == ["a var(--c0)", "b var(--c1)"]
    assert legends["agent/*/reward_mean"] == ["solver var(--c0)", "verifier var(--c1)"] * 2
    rows = page.until(
        "[...document.querySelectorAll('#different tr')].map(row => row.innerText.split('\\t').join('|'))"
    )
    # differences of t and u are 0.5 each
    assert rows == [
        "|a|b|difference, with its 95 % interval",
        "trained avg@2 (2 tasks)|37.5\xa0%|87.5\xa0%|+50.0 points [50.0, 50.0]",
        "seed|1|2|",
    ]
    put(page, "other", "", "change")
    page.until(f"{dashes} === 0 && document.getElementById('differences').hidden")


def test_agents_of_another_team_have_colours_of_their_own(page: Browser, tmp_path: Path) -> None:
    other = write_small_run(tmp_path / "results/c", {"t": 1.0}, agents={"judge": {}, "coder": {}})
    with (other / "train/metrics.jsonl").open("a") as file:
        for agent in ("judge", "coder"):
            file.write(json.dumps({"step": 1, f"agent/{agent}/reward_mean": 0.5}) + "\n")
    page.until("[...document.getElementById('other').options].some(option => option.value === 'c')")
    put(page, "other", "c", "change")
    page.until(f"{LEGENDS}['agent/*/reward_mean'].length === 4")
    # The file of the config names agents in the order of the alphabet.
    assert page.value(LEGENDS)["agent/*/reward_mean"] == [
        "solver var(--c0)",
        "verifier var(--c1)",
        "coder var(--c2)",
        "judge var(--c3)",
    ]


# Call a function with "c", and with another name while a request of the first call has no answer.
CHOOSE_C_THEN = """(async () => {{
  const send = fetch;
  let release, noteRequest;
  const released = new Promise(resolve => {{ release = resolve; }});
  const requested = new Promise(resolve => {{ noteRequest = resolve; }});
  window.fetch = async (path, ...rest) => {{
    if (path.startsWith({2!r})) {{
      noteRequest();
      await released;
    }}
    return send(path, ...rest);
  }};
  const choose = {0};
  const first = choose("c");
  await requested;
  await choose({1!r});
  release();
  await first;
  window.fetch = send;
}})()"""


def test_a_late_answer_about_a_run_changes_nothing_in_the_run_chosen_after_it(
    page: Browser, tmp_path: Path
) -> None:
    write_small_run(tmp_path / "results/c", {"t": 1.0}, agents={"judge": {}}, seed=3)
    has_option = (
        "[...document.getElementById('other').options].some(option => option.value === {!r})"
    )
    page.until(has_option.format("c"))
    agents_of_c = "/api/agents?run=c"
    page.value(CHOOSE_C_THEN.format("chooseRun", "b", agents_of_c))
    assert page.value("[run.name, ...run.agents]") == ["b", "solver", "verifier"]
    page.until(has_option.format("a"))
    choose_other = "name => { byId('other').value = name; return compareRuns(); }"
    page.value(CHOOSE_C_THEN.format(choose_other, "a", agents_of_c))
    assert page.value("[other.name, ...other.agents]") == ["a", "solver", "verifier"]
    page.value(CHOOSE_C_THEN.format(choose_other, "a", "/api/compare?a=b&b=c"))
    # The seeds of b and a are 2 and 1.
    assert page.value("byId('different').lastChild.textContent") == "seed21"


def test_a_late_list_is_not_shown_in_the_run_chosen_after_it(page: Browser) -> None:
    choose = "name => name === 'c' ? showTrajectories() : chooseRun(name)"
    page.value(CHOOSE_C_THEN.format(choose, "b", "/api/trajectories?run=a"))
    assert page.value(LISTED) == ""


def test_a_run_without_trajectories_shows_none_of_the_run_before(page: Browser) -> None:
    page.until("byId('timeline').textContent")
    page.value("chooseRun('b')")
    page.until("byId('talk').hidden && !byId('no_files').hidden", seconds=20)
    assert page.value("byId('file').length + byId('waiting_file').length") == 0
    assert page.value("byId('timeline').textContent") == ""


def test_the_chosen_step_stays_in_both_lists_when_a_step_ends(
    page: Browser, tmp_path: Path
) -> None:
    def end_step(number: int) -> None:
        file = tmp_path / f"results/a/train/trajectories/step_{number:06}.parquet"
        write_trajectories(file, [one_turn(1, "solver")])

    end_step(3)
    end_step(4)
    page.until("byId('file').length === 3", seconds=20)
    chosen = "train/trajectories/step_000003.parquet"
    put(page, "file", chosen, "change")
    end_step(5)
    page.until("byId('file').length === 4", seconds=20)
    assert page.value("[byId('file').value, byId('waiting_file').value]") == [chosen, chosen]


def test_files_of_an_evaluation_are_listed_after_the_last_step(
    page: Browser, tmp_path: Path
) -> None:
    drawn(page, "reward/mean", 2)
    file = tmp_path / "results/a/evaluation/trained/part_000000.parquet"
    write_trajectories(file, [one_turn(1, "solver")])
    page.until(
        "[...document.getElementById('file').options].some(option => option.textContent.includes('trained'))",
        seconds=20,
    )


def test_hostile_names_are_text_in_charts_and_tooltips(page: Browser, tmp_path: Path) -> None:
    """Names of agents and sources come from files; Vega gets them as values, never as code."""
    name = "<img src=x onerror=\"document.title='owned'\"> ']}); document.title='owned'; ({['"
    row = {f"agent/{name}/reward_mean": 0.5, f"validation/{name}/accuracy": 0.25}
    with (tmp_path / "results/a/train/metrics.jsonl").open("a") as file:
        for step in (3, 4):
            file.write(json.dumps({"step": step, **row}) + "\n")
    drawn(page, "agent/*/reward_mean", 4)
    assert name in page.value(
        "charts.get('agent/*/reward_mean').figure.querySelector('.legend').textContent"
    )
    assert name in page.value(HOVER.format("right", "agent/*/reward_mean"))
    assert page.value("document.querySelectorAll('main img, #tooltip img').length") == 0
    assert page.value("document.title") == "mcore-mas studio"


def test_a_failed_run_shows_its_cause_and_the_newest_run_is_opened(
    page: Browser, tmp_path: Path
) -> None:
    log = tmp_path / "results/a/logs/train.log"
    log.parent.mkdir()
    log.write_text("Traceback\nerror: ValueError: boom\n")
    facts = "document.getElementById('facts').textContent"
    page.until(
        f"{facts}.startsWith('failed at step 3 of 4: train: ValueError: boom (')", seconds=20
    )
    button = "document.querySelector('#runs button')"
    assert page.value(f"{button}.querySelector('small').textContent").startswith("failed · step 3")
    assert page.value(f"{button}.querySelector('progress')") is None

    os.utime(tmp_path / "results/b/train/metrics.jsonl", (2**31, 2**31))
    page.value("location.hash = ''; location.reload(); 0")
    page.until("document.getElementById('title')?.textContent === 'b'", seconds=20)
