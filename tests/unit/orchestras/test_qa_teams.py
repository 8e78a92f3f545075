"""The teams that split, read and rewrite questions: who is told what, and what a malformed reply leads to."""

from __future__ import annotations

import pytest

from rollout.orchestras.replies import parse_evidence, parse_queries, parse_selection
from rollout.orchestras.search import select
from rollout.records.trajectory import Task, Trajectory
from tests.support.shipped import Library, play_shipped, seen

TASK = Task(
    id="t", prompt="Who?", answers=("Alice Walker",), env="search", source="hops", split="train"
)
TEXT = {"env": {"style": "text", "top_k": 2}}
SPLIT = "Two facts. <queries>\na\n  b  \n</queries>"
ANSWER = "<answer>Walker</answer>"  # one word of two: precision 1, recall 1/2
F1 = 2 / 3


def play(name: str, *replies: str) -> tuple[Trajectory, Library]:
    library = Library()
    return play_shipped(name, TASK, replies, sections=TEXT, retriever=library), library


def told(trajectory: Trajectory) -> list[str]:
    return [turn.agent for turn in trajectory.turns]


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [turn.reward for turn in trajectory.turns]


def test_one_report_of_everything_that_the_parts_found() -> None:
    replies = (SPLIT, "<evidence>of both</evidence>", ANSWER)
    sections = {**TEXT, "orchestra": {"read": "all"}}
    trajectory = play_shipped("qa_evidence", TASK, replies, sections=sections, retriever=Library())
    assert told(trajectory) == ["decomposer", "extractor", "answerer"]
    assert "# One of the searches made for it\na\nb\n" in seen(trajectory, 1)
    assert all(
        f"<information> {query} 1\n{query} 2 </information>\n" in seen(trajectory, 1)
        for query in "ab"
    )
    assert "<search> a\nb </search>\n<evidence> of both </evidence>\n" in seen(trajectory, 2)
    assert rewards(trajectory) == [F1, F1, F1]


def test_a_question_is_split_searched_and_answered() -> None:
    trajectory, library = play("qa_decompose", SPLIT, ANSWER)
    assert told(trajectory) == ["decomposer", "answerer"]
    assert library.asked == [("a", 2), ("b", 2)]
    assert "# Question\nWho?\n" in seen(trajectory, 0)
    found = "".join(
        f"<search> {q} </search>\n<information> {q} 1\n{q} 2 </information>\n" for q in "ab"
    )
    assert f"# Searches so far\n{found}" in seen(trajectory, 1)
    assert trajectory.outcome == F1
    assert trajectory.metrics == {
        "searches": 2,
        "invalid_searches": 0,
        "exact_match": 0.0,
        "token_f1": F1,
    }
    assert rewards(trajectory) == [F1, F1]
    assert [turn.round for turn in trajectory.turns] == [0, 1]
    assert [(tool.after_turn, tool.query) for tool in trajectory.tools] == [(0, "a"), (0, "b")]


def test_a_malformed_decomposition_finds_nothing_and_costs() -> None:
    trajectory, library = play("qa_decompose", "I would ask who.", ANSWER)
    assert library.asked == []
    assert "# Searches so far\n<search>  </search>\n<information> </information>\n" in seen(
        trajectory, 1
    )
    assert trajectory.metrics["invalid_searches"] == 1
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert rewards(trajectory) == [F1 - 1, F1]


@pytest.mark.parametrize("name", ["qa_decompose", "qa_evidence"])
def test_a_malformed_answer_is_an_empty_one(name: str) -> None:
    trajectory, _ = play(name, "?", "Alice Walker")
    assert (trajectory.outcome, trajectory.answer) == (0.0, "")
    assert rewards(trajectory) == [-1.0, -1.0]


def test_evidence_is_extracted_for_each_part_and_stands_for_its_passages() -> None:
    replies = [SPLIT, "<evidence>of a</evidence>", "no tag", "<answer>Alice Walker</answer>"]
    trajectory, library = play("qa_evidence", *replies)
    assert told(trajectory) == ["decomposer", "extractor", "extractor", "answerer"]
    assert library.asked == [("a", 2), ("b", 2)]
    for turn, query in ((1, "a"), (2, "b")):
        assert f"# One of the searches made for it\n{query}\n" in seen(trajectory, turn)
        assert f"found\n<information> {query} 1\n{query} 2 </information>\n" in seen(
            trajectory, turn
        )
    history = "<search> a </search>\n<evidence> of a </evidence>\n<search> b </search>\n<evidence>  </evidence>\n"
    assert f"# Searches so far\n{history}" in seen(trajectory, 3)
    assert "b 1" not in seen(trajectory, 3)
    assert trajectory.outcome == 1.0
    assert rewards(trajectory) == [1.0, 1.0, 0.0, 1.0]
    assert [turn.round for turn in trajectory.turns] == [0, 1, 1, 1]


def test_nobody_reads_what_an_unsplit_question_did_not_find() -> None:
    trajectory, _ = play("qa_evidence", "<queries></queries>", ANSWER)
    assert told(trajectory) == ["decomposer", "answerer"]
    assert "# Searches so far\n<search>  </search>\n<evidence>  </evidence>\n" in seen(
        trajectory, 1
    )


def test_a_rewritten_question_is_answered_from_the_selected_passages() -> None:
    trajectory, library = play("qa_rewrite", "<search>w</search>", "<select> 2 </select>", ANSWER)
    assert told(trajectory) == ["rewriter", "selector", "answerer"]
    assert library.asked == [("w", 2)]
    assert 'a search for "w" found\n1. w 1\n2. w 2\n' in seen(trajectory, 1)
    assert "<search> w </search>\n<information> w 2 </information>\n" in seen(trajectory, 2)
    assert rewards(trajectory) == [F1, F1, F1]


@pytest.mark.parametrize(
    "choice", ["<select> none </select>", "<select> 3 </select>", "<select> 2, 2 </select>", "2"]
)
def test_a_selection_of_nothing_leaves_an_empty_note(choice: str) -> None:
    trajectory, _ = play("qa_rewrite", "<search>w</search>", choice, ANSWER)
    assert "<search> w </search>\n<information>  </information>\n" in seen(trajectory, 2)
    malformed = choice in ("<select> 2, 2 </select>", "2")
    assert rewards(trajectory) == [F1, F1 - 1 if malformed else F1, F1]


@pytest.mark.parametrize(
    ("query", "searches", "cost"), [("Who?", 0, 1), ("<search>nothing</search>", 1, 0)]
)
def test_without_passages_nobody_selects(query: str, searches: int, cost: float) -> None:
    trajectory, _ = play("qa_rewrite", query, ANSWER)
    assert told(trajectory) == ["rewriter", "answerer"]
    assert (trajectory.metrics["searches"], trajectory.metrics["invalid_searches"]) == (
        searches,
        1 - searches,
    )
    assert rewards(trajectory) == [F1 - cost, F1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<queries> one </queries>", "one"),
        ("<queries>\na\n\n b \nc\n</queries>", "a\nb\nc"),
        ("<queries>\na\nb\nc\nd\n</queries>", None),
        ("<queries>\na\na\n</queries>", None),
        ("<queries>\na <b>\n</queries>", None),
        ("<queries>\n</queries>", None),
        ("a\nb", None),
    ],
)
def test_parse_queries(text: str, value: str | None) -> None:
    assert parse_queries(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<select> 1 ,3 </select>", "1,3"),
        ("<select>2</select> no, <select> NONE </select>", "none"),
        ("<select> 1, 1 </select>", None),
        ("<select> 0 </select>", None),
        ("<select> 1 and 2 </select>", None),
        ("<select> 1, none </select>", None),
        ("<select></select>", None),
        ("1", None),
    ],
)
def test_parse_selection(text: str, value: str | None) -> None:
    assert parse_selection(text) == value


def test_select_keeps_the_order_of_the_selection() -> None:
    assert select(("a", "b", "c"), "3,1,9") == ["c", "a"]
    assert select(("a",), "none") == select(("a",), None) == []


@pytest.mark.parametrize(
    ("text", "value"), [("<evidence> x </evidence>", "x"), ("<evidence> </evidence>", None)]
)
def test_parse_evidence(text: str, value: str | None) -> None:
    assert parse_evidence(text) == value
