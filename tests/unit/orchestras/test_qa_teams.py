"""Orchestras `qa_decompose`, `qa_evidence` and `qa_rewrite`: searches, prompts and rewards."""

from __future__ import annotations

import pytest

from rollout.orchestras.replies import parse_evidence, parse_queries, parse_selection
from rollout.orchestras.search import select_passages
from rollout.records.trajectory import Task, Trajectory
from tests.support.casts import speakers, validity
from tests.support.shipped import Library, last_message, play_shipped

TASK = Task(
    id="t", prompt="Who?", answers=("Alice Walker",), env="search", source="hops", split="train"
)
TWO_PASSAGES = {"env": {"style": "text", "top_k": 2}}
SPLIT = "Two facts. <queries>\na\n  b  \n</queries>"
REWRITTEN = "<search>w</search>"
ANSWER = "<answer>Walker</answer>"  # one word of two: precision 1, recall 1/2
F1 = 2 / 3


def play(name: str, *replies: str) -> tuple[Trajectory, Library]:
    """Play a shipped team, with two passages for each query; return trajectory and retriever."""
    library = Library()
    trajectory = play_shipped(name, TASK, replies, sections=TWO_PASSAGES, retriever=library)
    return trajectory, library


def passages(query: str) -> str:
    """Return the passages of a query as agents read them."""
    return f"<information> {query} 1\n{query} 2 </information>\n"


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [turn.reward for turn in trajectory.turns]


def test_a_question_is_split_searched_and_answered() -> None:
    trajectory, library = play("qa_decompose", SPLIT, ANSWER)
    assert speakers(trajectory) == ["decomposer", "answerer"]
    assert library.searches == [("a", 2), ("b", 2)]
    assert "# Question\nWho?\n" in last_message(trajectory, 0)
    history = f"<search> a </search>\n{passages('a')}<search> b </search>\n{passages('b')}"
    assert f"# Searches so far\n{history}" in last_message(trajectory, 1)
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


def test_a_malformed_decomposition_finds_nothing_and_is_penalized() -> None:
    trajectory, library = play("qa_decompose", "I would ask who.", ANSWER)
    assert library.searches == []
    history = "<search>  </search>\n<information> </information>\n"
    assert f"# Searches so far\n{history}" in last_message(trajectory, 1)
    assert trajectory.metrics["invalid_searches"] == 1
    assert validity(trajectory) == [False, True]
    assert rewards(trajectory) == [F1 - 1, F1]


@pytest.mark.parametrize("name", ["qa_decompose", "qa_evidence"])
def test_a_malformed_answer_is_scored_as_an_empty_one(name: str) -> None:
    trajectory, _ = play(name, "?", "Alice Walker")
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""
    assert rewards(trajectory) == [-1.0, -1.0]


def test_the_answerer_reads_the_evidence_of_each_query_in_place_of_its_passages() -> None:
    replies = [SPLIT, "<evidence>of a</evidence>", "no tag", "<answer>Alice Walker</answer>"]
    trajectory, library = play("qa_evidence", *replies)
    assert speakers(trajectory) == ["decomposer", "extractor", "extractor", "answerer"]
    assert library.searches == [("a", 2), ("b", 2)]
    for turn, query in ((1, "a"), (2, "b")):
        assert f"# One of the searches made for it\n{query}\n" in last_message(trajectory, turn)
        assert f"found\n{passages(query)}" in last_message(trajectory, turn)
    history = "<search> a </search>\n<evidence> of a </evidence>\n"
    history += "<search> b </search>\n<evidence>  </evidence>\n"
    assert f"# Searches so far\n{history}" in last_message(trajectory, 3)
    assert "b 1" not in last_message(trajectory, 3)
    assert trajectory.outcome == 1.0
    assert rewards(trajectory) == [1.0, 1.0, 0.0, 1.0]
    assert [turn.round for turn in trajectory.turns] == [0, 1, 1, 1]


def test_the_extractor_may_read_the_passages_of_all_queries_at_once() -> None:
    replies = (SPLIT, "<evidence>of both</evidence>", ANSWER)
    sections = {**TWO_PASSAGES, "orchestra": {"read": "all"}}
    trajectory = play_shipped("qa_evidence", TASK, replies, sections=sections, retriever=Library())
    assert speakers(trajectory) == ["decomposer", "extractor", "answerer"]
    extractor_prompt = last_message(trajectory, 1)
    assert "# One of the searches made for it\na\nb\n" in extractor_prompt
    assert passages("a") in extractor_prompt
    assert passages("b") in extractor_prompt
    assert "<search> a\nb </search>\n<evidence> of both </evidence>\n" in last_message(
        trajectory, 2
    )
    assert rewards(trajectory) == [F1, F1, F1]


def test_the_extractor_is_not_asked_after_a_malformed_decomposition() -> None:
    trajectory, _ = play("qa_evidence", "<queries></queries>", ANSWER)
    assert speakers(trajectory) == ["decomposer", "answerer"]
    history = "<search>  </search>\n<evidence>  </evidence>\n"
    assert f"# Searches so far\n{history}" in last_message(trajectory, 1)


def test_a_rewritten_question_is_answered_from_the_selected_passages() -> None:
    trajectory, library = play("qa_rewrite", REWRITTEN, "<select> 2 </select>", ANSWER)
    assert speakers(trajectory) == ["rewriter", "selector", "answerer"]
    assert library.searches == [("w", 2)]
    assert 'a search for "w" found\n1. w 1\n2. w 2\n' in last_message(trajectory, 1)
    assert "<search> w </search>\n<information> w 2 </information>\n" in last_message(trajectory, 2)
    assert rewards(trajectory) == [F1, F1, F1]


@pytest.mark.parametrize(
    ("selection", "valid"),
    [
        ("<select> none </select>", True),
        ("<select> 3 </select>", True),
        ("<select> 2, 2 </select>", False),
        ("2", False),
    ],
)
def test_the_answerer_reads_no_passage_if_none_is_selected(selection: str, valid: bool) -> None:
    trajectory, _ = play("qa_rewrite", REWRITTEN, selection, ANSWER)
    assert "<search> w </search>\n<information>  </information>\n" in last_message(trajectory, 2)
    assert rewards(trajectory) == [F1, F1 if valid else F1 - 1, F1]


@pytest.mark.parametrize(
    ("query", "searches", "penalty"), [("Who?", 0, 1), ("<search>nothing</search>", 1, 0)]
)
def test_the_selector_is_not_asked_without_passages(
    query: str, searches: int, penalty: float
) -> None:
    trajectory, _ = play("qa_rewrite", query, ANSWER)
    assert speakers(trajectory) == ["rewriter", "answerer"]
    assert trajectory.metrics["searches"] == searches
    assert trajectory.metrics["invalid_searches"] == 1 - searches
    assert rewards(trajectory) == [F1 - penalty, F1]


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


def test_passages_are_in_the_order_of_the_selection() -> None:
    assert select_passages(("a", "b", "c"), "3,1,9") == ["c", "a"]
    assert select_passages(("a",), "none") == []
    assert select_passages(("a",), None) == []


@pytest.mark.parametrize(
    ("text", "value"), [("<evidence> x </evidence>", "x"), ("<evidence> </evidence>", None)]
)
def test_parse_evidence(text: str, value: str | None) -> None:
    assert parse_evidence(text) == value
