"""A trajectory as a page: all of it is there, and nothing that a model wrote is more than text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from mcore_mas.cli.main import main
from mcore_mas.config.compose import resolve
from mcore_mas.reports import pages
from mcore_mas.reports.pages import trajectory_page
from mcore_mas.reports.terminal import credit_of
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import Message, Status, ToolEvent, VersionSpan
from tests.support.played import trajectory, turn

ATTACK = '</pre><script>alert(1)</script><img src=x onerror="alert(2)">" onload=\'x\' &lt;b&gt; \x00\x1b[31m\u202e\x9b\ud800'  # noqa: E501
VOID = {"meta"}


class Page(HTMLParser):
    """A page's elements, text and nesting, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def attacked(**fields):
    message = Message(role=ATTACK, content=ATTACK)
    return trajectory(
        turn(0, ATTACK, {ATTACK: 1.0}, policy=ATTACK, messages=(message,), text=ATTACK, reward=0.5),
        turn(1, "verifier", text=ATTACK, masked=True, valid=False, finish_reason="length"),
        tools=(
            ToolEvent(
                after_turn=0, tool=ATTACK, query=f"{ATTACK}\n", result=ATTACK * 20, failed=True
            ),
        ),
        **{
            "id": ATTACK,
            "task_id": ATTACK,
            "source": ATTACK,
            "answer": ATTACK,
            "metrics": {ATTACK: 1.0},
        }
        | fields,
    )


@pytest.mark.parametrize(
    "fields", [{}, {"status": Status.FAILED, "error": ATTACK, "outcome": None}], ids=str
)
def test_what_a_model_wrote_is_text_and_nothing_else(fields):
    written = trajectory_page(attacked(**fields), {})
    found = Page(written)
    harmless = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "h1",
        "h2",
        "p",
        "ul",
        "li",
        "b",
    }
    harmless |= {
        "i",
        "small",
        "pre",
        "code",
        "div",
        "span",
        "article",
        "section",
        "details",
        "summary",
        "em",
    }
    assert {tag for tag, _ in found.elements} <= harmless
    known = {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "style",
        "dir",
        "open",
        "aria-hidden",
    }
    assert {name for _, attributes in found.elements for name in attributes} <= known
    assert all(
        "alert" not in (value or "")
        for _, attributes in found.elements
        for value in attributes.values()
    )
    assert "</pre><script>alert(1)</script>" in found.text()  # it can be read
    assert not set(written) & set("\x00\x1b\u202e\x9b")
    assert "\\x00\\x1b[31m\\u202e\\x9b\N{REPLACEMENT CHARACTER}" in found.text()  # and so can this
    written.encode("utf-8")


def test_the_page_stands_by_itself():
    written = trajectory_page(attacked(), {})
    policy = next(
        a["content"]
        for _, a in Page(written).elements
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not any(
        word in written for word in ("http://", "https://", "url(", "@import", "<link", "<script")
    )


def test_no_template_of_a_page_lifts_the_escape():
    templates = sorted(Path(pages.__file__).with_name("templates").glob("*.html.jinja"))
    own_policy = {path.name for path in templates if "default-src 'none'" in path.read_text()}
    assert own_policy == {
        "charts.html.jinja",
        "runs.html.jinja",
        "table.html.jinja",
        "trajectory.html.jinja",
    }
    assert {path.name for path in templates} - own_policy == {
        "studio.html.jinja"
    }  # its server sends one
    for path in templates:
        text = re.sub(
            r"{% raw %}.*?{% endraw %}", "", path.read_text(), flags=re.DOTALL
        )  # a script of ours
        assert not re.search(r"\|\s*safe\b|autoescape|Markup|xmlattr|include|import", text), (
            path.name
        )


def test_a_table_shows_names_as_text(tmp_path):
    written = pages.render_page(
        "table.html.jinja", rows=[{"policy": ATTACK}], numbers=(), gain="", note=ATTACK
    )
    found = Page(written)
    table = {"table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in found.elements} <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "p",
    } | table
    assert found.text().count("</pre><script>alert(1)</script>") == 2


def test_a_line_says_who_said_what_and_what_it_was_worth():
    played = trajectory(
        turn(
            0,
            "solver",
            {"team": 1.0},
            messages=(Message(role="user", content="What is 1+2?"),),
            text="\\boxed{3}",
            completion_ids=(1, 2),
            logprobs=(-0.5, -0.25),
            versions=(
                VersionSpan(version=3, start=0, end=1),
                VersionSpan(version=4, start=1, end=2),
            ),
            reward=0.9,
        ),
        turn(
            1,
            "verifier",
            text="APPROVE",
            reward=0.5,
            masked=True,
            valid=False,
            finish_reason="length",
        ),
        tools=(ToolEvent(after_turn=0, tool="python", query="1+2", result="3"),),
    )
    found = Page(
        trajectory_page(
            played, {("0/t/0", "", 0): 0.75, ("0/t/0", "", 1): -0.25, ("other", "", 0): 9.0}
        )
    )
    evaluated = Page(trajectory_page(replace(played, step=-2), {})).text()
    assert "s, step 0, sample 0" in found.text() and "s, sample 0" in evaluated
    text = found.text()
    assert (
        text.index("What is 1+2?")
        < text.index("\\boxed{3}")
        < text.index("python 1+2 3")
        < text.index("APPROVE")
    )
    assert "solver, playing p, 1 turn verifier, playing p, 1 turn" in text
    assert "reward 0.9 advantage +0.75 team 1 2 tokens, log p -0.75 weights v3 to v4" in text
    assert "reward 0.5 advantage -0.25" in text
    assert "verifier turn 1 masked malformed cut off" in text
    bars = [a for tag, a in found.elements if tag == "i"]
    assert bars == [
        {"class": "up", "style": "--share:1.000"},
        {"class": "down", "style": "--share:0.333"},
    ]
    hues = [a["style"] for tag, a in found.elements if tag == "article"]
    assert hues == ["--hue:var(--a0)", "--hue:var(--a1)"]


def test_a_tree_folds_what_did_not_go_on_where_it_was_left():
    turns = [
        turn(0, node="0", text="left", scores={"branch": 1.0}),
        turn(0, node="1", text="right", scores={"branch": 5.0}),
        turn(1, node="1.0", text="end", scores={"branch": 4.0}),
        turn(1, node="1.1", text="other end", scores={"branch": 2.0}),
    ]
    found = Page(trajectory_page(trajectory(*turns, leaf="1.0"), {}))
    text = found.text()
    assert "2 turns of 4 in the tree" in text
    assert [text.index(word) for word in ("right", "left", "end", "other end")] == sorted(
        text.index(word) for word in ("right", "left", "end", "other end")
    )
    folded = [a for tag, a in found.elements if tag == "details" and a.get("class") == "branches"]
    assert folded == [{"class": "branches"}] * 2
    assert text.count("1 branch that did not go on") == 2


@pytest.fixture
def recorded(tmp_path):
    """A run's trajectories of one task with rewards 1 and 0, with the run's config where it belongs."""
    values = resolve(["experiment=demo_math", "advantage={name: grpo}", f"results={tmp_path}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    played = [
        trajectory(
            turn(0, policy="solver", text=f"it is {sample}", reward=1.0 - sample), sample=sample
        )
        for sample in (0, 1)
    ]
    path = tmp_path / "train" / "trajectories" / "step_000000.parquet"
    write_trajectories(path, played)
    return path


def test_advantages_are_those_of_the_run(recorded):
    found, _ = credit_of(recorded, read_trajectories(recorded))
    # rewards 1 and 0: mean 0.5, deviation with n - 1 0.7071; 0.5 / 0.7071
    assert found == pytest.approx({("0/t/0", "", 0): 0.70711, ("0/t/1", "", 0): -0.70711}, abs=1e-4)
    lone = recorded.with_name("elsewhere.parquet")
    write_trajectories(lone, [trajectory(turn(0))])  # no rewards
    assert credit_of(lone, read_trajectories(lone)) == ({}, {})


def test_the_page_of_a_turn_shows_whom_it_was_compared_with(recorded):
    played = read_trajectories(recorded)
    advantages, groups = credit_of(recorded, played)
    text = Page(trajectory_page(played[1], advantages, groups=groups)).text()
    assert text.endswith(
        "peers: 2 votes, mean 0.5, σ 0.7071, of turns alike in task One vote per trajectory. "
        "sample turn agent reward vote advantage 0 0 solver 1 1 +0.707 1 0 solver 0 0 -0.707"
    )
    own = re.findall(
        r'<tr class="own"><td>(\d)</td>', trajectory_page(played[1], advantages, groups=groups)
    )
    assert own == ["1"]


def test_a_turn_is_in_a_group_of_each_comparison(recorded):
    values = resolve(["experiment=demo_math"]) | {
        "advantage": {"name": "grpo", "options": {"std": "agent"}}
    }
    (recorded.parents[2] / "config.yaml").write_text(yaml.safe_dump(values))
    rewards = {"t": [(1.0, 5.0), (0.0, 4.0)], "u": [(1.0, 9.0)]}
    played = [
        trajectory(
            *(
                turn(i, agent, reward=reward)
                for i, (agent, reward) in enumerate(zip(("solver", "verifier"), own, strict=True))
            ),
            sample=sample,
            task_id=task,
            id=f"0/{task}/{sample}",
        )
        for task, samples in rewards.items()
        for sample, own in enumerate(samples)
    ]
    write_trajectories(recorded, played)
    _, groups = credit_of(recorded, read_trajectories(recorded))
    mean, std = groups["0/t/0", "", 1]
    # votes of the task: the means of 1 and 5, and of 0 and 4; of the verifier: 5 and 4
    assert (mean.label, mean.size, mean.mean, std.label, std.mean) == ("mean", 2, 2.5, "std", 4.5)
    assert [(s.id, vote) for s, vote, _ in mean.members] == [
        (("0/t/0", "", 0), 3), (("0/t/0", "", 1), 3), (("0/t/1", "", 0), 2), (("0/t/1", "", 1), 2)
    ]  # fmt: skip
    assert [(s.id, vote) for s, vote, _ in std.members] == [
        (("0/t/0", "", 1), 5),
        (("0/t/1", "", 1), 4),
    ]
    assert len(groups["0/u/0", "", 0][0].members) == 2


def test_the_command_prints_advantages_and_writes_the_page(recorded, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "page.html"
    for arguments in (["--index", "1"], ["--index", "1", "--html", str(out)]):
        monkeypatch.setattr("sys.argv", ["mcore-mas", "show", str(recorded), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "reward 0 · advantage -0.707" in said
    assert said.rstrip().endswith(str(out).rpartition("/")[2])
    assert "it is 1" in Page(out.read_text()).text()
