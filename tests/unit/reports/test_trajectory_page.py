"""The page of a trajectory has all of it, and nothing that a model wrote is more than text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.cli.main import main
from mcore_mas.reports.task_texts import TaskText
from mcore_mas.reports.trajectory_page import trajectory_page
from mcore_mas.reports.turn_credit import compute_turn_credit
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Message, Status, ToolEvent, Trajectory, Turn, VersionSpan
from tests.support.html_page import ATTACK, HtmlPage
from tests.support.played import trajectory, turn
from tests.support.rewarded import write_rewarded_step

HARMLESS_TAGS = {
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
    "dl",
    "dt",
    "dd",
    "b",
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
HARMLESS_ATTRIBUTES = {
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


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_rewarded_step(tmp_path)


def attacking_trajectory(**fields: Any) -> Trajectory:
    """Return a trajectory that has the attack in every text."""
    message = Message(role=ATTACK, content=ATTACK)
    tool = ToolEvent(
        after_turn=0, tool=ATTACK, query=f"{ATTACK}\n", result=ATTACK * 20, failed=True
    )
    texts: dict[str, Any] = {
        "id": ATTACK,
        "task_id": ATTACK,
        "source": ATTACK,
        "answer": ATTACK,
        "metrics": {ATTACK: 1.0},
    }
    return trajectory(
        turn(0, ATTACK, {ATTACK: 1.0}, policy=ATTACK, messages=(message,), text=ATTACK, reward=0.5),
        turn(1, "verifier", text=ATTACK, masked=True, valid=False, finish_reason="length"),
        tools=(tool,),
        **texts | fields,
    )


@pytest.mark.parametrize(
    "fields", [{}, {"status": Status.FAILED, "error": ATTACK, "outcome": None}], ids=str
)
def test_a_text_of_a_model_is_shown_and_nothing_else(fields: dict[str, Any]) -> None:
    task = TaskText(question=ATTACK, answers=(ATTACK,))
    written = trajectory_page(attacking_trajectory(**fields), {}, task=task)
    page = HtmlPage(written)
    assert {tag for tag, _ in page.elements} <= HARMLESS_TAGS
    attributes = [item for _, attributes in page.elements for item in attributes.items()]
    assert {name for name, _ in attributes} <= HARMLESS_ATTRIBUTES
    assert not [value for _, value in attributes if "alert" in (value or "")]
    assert "</pre><script>alert(1)</script>" in page.text()
    assert not set(written) & set("\x00\x1b\u202e\x9b")
    assert "\\x00\\x1b[31m\\u202e\\x9b\N{REPLACEMENT CHARACTER}" in page.text()
    written.encode("utf-8")


def test_the_page_loads_nothing() -> None:
    written = trajectory_page(attacking_trajectory(), {})
    (policy,) = [
        attributes["content"]
        for _, attributes in HtmlPage(written).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    for word in ("http://", "https://", "url(", "@import", "<link", "<script"):
        assert word not in written


def test_a_turn_has_its_text_scores_reward_and_advantage() -> None:
    solver = turn(
        0,
        "solver",
        {"team": 1.0},
        messages=(Message(role="user", content="What is 1+2?"),),
        text="\\boxed{3}",
        completion_ids=(1, 2),
        logprobs=(-0.5, -0.25),
        versions=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
        reward=0.9,
    )
    verifier = turn(
        1,
        "verifier",
        text="APPROVE",
        reward=0.5,
        masked=True,
        valid=False,
        finish_reason="length",
    )
    tool = ToolEvent(after_turn=0, tool="python", query="1+2", result="3")
    played = trajectory(solver, verifier, tools=(tool,))
    advantages = {("0/t/0", "", 0): 0.75, ("0/t/0", "", 1): -0.25, ("other", "", 0): 9.0}
    page = HtmlPage(trajectory_page(played, advantages))
    text = page.text()

    assert "s, step 1, sample 0" in text
    evaluated = HtmlPage(trajectory_page(replace(played, step=-2), {}))
    assert "s, sample 0" in evaluated.text()
    order = [text.index(part) for part in ("What is", "\\boxed{3}", "python 1+2 3", "APPROVE")]
    assert order == sorted(order)
    assert "solver, playing p, 1 turn verifier, playing p, 1 turn" in text
    assert "reward 0.9 advantage +0.75 team 1 2 tokens, log p -0.75 weights v3 to v4" in text
    assert "reward 0.5 advantage -0.25" in text
    assert "verifier turn 1 masked malformed cut off" in text
    bars = [attributes for tag, attributes in page.elements if tag == "i"]
    assert bars == [
        {"class": "up", "style": "--share:1.000"},
        {"class": "down", "style": "--share:0.333"},
    ]
    colours = [attributes["style"] for tag, attributes in page.elements if tag == "article"]
    assert colours == ["--colour:var(--c0)", "--colour:var(--c1)"]


@pytest.mark.parametrize(("outcome", "mark"), [(1.0, "✓ 3"), (0.0, "✗ 3"), (0.5, "3"), (None, "3")])
def test_the_head_has_the_question_and_both_answers(outcome: float | None, mark: str) -> None:
    task = TaskText(question="What is 1+2?", answers=("3", "three"))
    page = HtmlPage(trajectory_page(trajectory(answer="3", outcome=outcome), {}, task=task))
    assert f"t What is 1+2? right answer 3 or three given answer {mark} completed" in page.text()
    without_task = HtmlPage(trajectory_page(trajectory(), {})).text()
    assert "t given answer ✓ none completed" in without_task


def test_an_agent_has_the_colour_of_its_position_in_the_run() -> None:
    played = trajectory(turn(0, "verifier"), turn(1, "stranger"))
    page = HtmlPage(trajectory_page(played, {}, agent_order=["solver", "verifier"]))
    colours = [attributes["style"] for tag, attributes in page.elements if tag == "article"]
    assert colours == ["--colour:var(--c1)", "--colour:var(--c2)"]


def test_the_alternatives_of_a_turn_are_folded_after_it() -> None:
    def alternative(index: int, node: str, outcome: float) -> Turn:
        text = f"alternative {node} of {index}"
        return turn(index, scores={"replay_outcome": outcome}, node=node, text=text)

    page = trajectory_page(
        trajectory(
            turn(0, text="first"),
            alternative(0, "1", 7.0),
            alternative(0, "2", 0.5),
            turn(1, text="second"),
            alternative(1, "1", 3.0),
        ),
        {},
    )
    text = HtmlPage(page).text()
    shown = [
        "2 turns, 3 alternatives",
        "first",
        "2 alternatives, each replayed to its outcome",
        "alternative 1 of 0",
        "replay_outcome 7",
        "alternative 2 of 0",
        "replay_outcome 0.5",
        "second",
        "1 alternative, each replayed to its outcome",
        "alternative 1 of 1",
        "replay_outcome 3",
    ]
    positions = [text.index(part) for part in shown]
    assert positions == sorted(positions)


def test_a_tree_folds_branches_where_they_left_the_path() -> None:
    turns = [
        turn(0, node="0", text="left"),
        turn(0, node="1", text="right"),
        turn(1, node="1.0", text="end"),
        turn(1, node="1.1", text="other end"),
    ]
    page = HtmlPage(trajectory_page(trajectory(*turns, leaf="1.0"), {}))
    text = page.text()
    assert "2 turns of 4 in the tree" in text
    order = [text.index(part) for part in ("right", "left", "end", "other end")]
    assert order == sorted(order)
    folded = [
        attributes
        for tag, attributes in page.elements
        if tag == "details" and attributes.get("class") == "branches"
    ]
    assert folded == [{"class": "branches"}, {"class": "branches"}]
    assert text.count("1 branch that did not lead to the outcome") == 2


def test_a_branch_is_folded_with_all_turns_below_it() -> None:
    """The best attempt, "0", was improved twice in vain; so was "1", which was worse from the start."""
    nodes = ("1", "0", "1.0", "0.0", "0.0.0")
    turns = [turn(index, node=node, text=f"at {node}") for index, node in enumerate(nodes)]
    text = HtmlPage(trajectory_page(trajectory(*turns, leaf="0"), {})).text()
    assert "1 turn of 5 in the tree" in text
    assert text.count("2 branches that did not lead to the outcome") == 1
    titles = re.findall(r"turn \d · branch ([0-9.]+)", text)
    assert titles == ["0", "1", "1.0", "0.0", "0.0.0"]


def test_a_tree_without_a_best_attempt_is_folded_whole() -> None:
    turns = [turn(0, node="0", text="left"), turn(1, node="1", text="right")]
    text = HtmlPage(trajectory_page(trajectory(*turns), {})).text()
    assert "0 turns of 2 in the tree" in text
    assert "2 branches that did not lead to the outcome" in text
    assert "left" in text and "right" in text


def test_a_turn_has_its_peer_groups(recorded: Path) -> None:
    played = read_trajectories(recorded)
    advantages, groups = compute_turn_credit(recorded, played)
    written = trajectory_page(played[1], advantages, groups=groups)
    assert (
        HtmlPage(written)
        .text()
        .endswith(
            "peers: 2 votes, mean 0.5, σ 0.7071, of turns alike in task One vote per trajectory. "
            "sample turn agent reward vote advantage 0 0 solver 1 1 +0.707 1 0 solver 0 0 -0.707"
        )
    )
    assert re.findall(r'<tr class="this-turn"><td>(\d)</td>', written) == ["1"]


def test_a_peer_group_without_columns_has_all_turns(recorded: Path) -> None:
    played = read_trajectories(recorded)
    advantages, groups = compute_turn_credit(recorded, played)
    of_all_turns = {
        turn_id: [replace(group, peer_columns=()) for group in turn_groups]
        for turn_id, turn_groups in groups.items()
    }
    text = HtmlPage(trajectory_page(played[1], advantages, groups=of_all_turns)).text()
    assert "σ 0.7071, of all turns of the step One vote per trajectory. " in text


def test_the_command_prints_advantages_and_writes_the_page(
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "page.html"
    for arguments in ([], ["--html", str(out)]):
        command = ["mcore-mas", "show", str(recorded), "--index", "2", *arguments]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "reward 0 · advantage -0.707" in output
    assert output.rstrip().endswith(out.name)
    assert "it is 1" in HtmlPage(out.read_text()).text()
