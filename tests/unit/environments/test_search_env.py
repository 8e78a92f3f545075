"""The search environment: queries to a retriever, scores of answers, and failures."""

from __future__ import annotations

import asyncio

import pytest

from retrieval.client import BadRequest, NoRetriever, Passage, RetrievalError
from rollout.base.errors import EnvError, Unusable
from rollout.environments.protocol import Step
from rollout.environments.search import SearchEnv
from rollout.records.trajectory import Task

TASK = Task(
    id="t", prompt="Who?", answers=("Silver Harbor",), env="search", source="one_hop", split="test"
)


class Shelf:
    """Two pages for any query, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.searches: list[tuple[str, int]] = []

    async def search(self, query: str, k: int) -> list[Passage]:
        self.searches.append((query, k))
        if self.error:
            raise self.error
        return [Passage.compose("0", "A", "Alpha."), Passage.compose("1", "B", "Beta.")][:k]


def play(env: SearchEnv, *actions: str) -> list[Step]:
    async def run() -> list[Step]:
        return [await env.step(action) for action in actions]

    assert env.reset(TASK) == "Who?"
    return asyncio.run(run())


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        ("search_r1", "Doc 1(Title: A) Alpha.\nDoc 2(Title: B) Beta."),
        ("verl", "Doc 1 (Title: A)\nAlpha.\n\nDoc 2 (Title: B)\nBeta."),
        ("text", "Alpha.\nBeta."),
    ],
)
def test_search_shows_the_passages(style: str, shown: str) -> None:
    shelf = Shelf()
    (step,) = play(
        SearchEnv(TASK, retriever=shelf, top_k=2, style=style), "I wonder. <search> alpha </search>"
    )
    assert shelf.searches == [("alpha", 2)]
    assert step.observation == f"<information> {shown} </information>"
    assert (step.reward, step.done) == (0.0, False)
    assert [(call.tool, call.query, call.result) for call in step.tools] == [
        ("search", "alpha", step.observation)
    ]
    assert step.metrics == {"searches": 1.0, "invalid_searches": 0.0}


@pytest.mark.parametrize(
    "action", ["", "alpha", "<search>  </search>", f"<search> {'x' * 501} </search>"]
)
def test_malformed_search_finds_nothing_and_is_counted(action: str) -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(TASK, retriever=shelf), action)
    assert shelf.searches == []
    assert step.observation == "<information> </information>"
    assert step.tools == ()
    assert step.metrics == {"searches": 0.0, "invalid_searches": 1.0}


@pytest.mark.parametrize(
    ("action", "answer", "match", "f1"),
    [
        ("<answer> the silver harbor </answer>", "silver harbor", 1.0, 1.0),
        ("<answer> Harbor </answer>", "harbor", 0.0, 2 / 3),
        ("<answer> </answer>", "", 0.0, 0.0),
        ("<answer> wool </answer> no, <answer>Silver Harbor</answer>", "silver harbor", 1.0, 1.0),
    ],
)
def test_answer_ends_and_is_scored(action: str, answer: str, match: float, f1: float) -> None:
    search, step = play(SearchEnv(TASK, retriever=Shelf()), "<search> alpha </search>", action)
    assert search.answer == ""
    assert step.answer == answer
    assert (step.reward, step.done) == (match, True)
    assert step.metrics["exact_match"] == match
    assert step.metrics["token_f1"] == pytest.approx(f1)
    assert step.metrics["searches"] == 1.0


def test_failed_retriever_is_an_error() -> None:
    with pytest.raises(EnvError, match="the retriever failed: no answer in 30 s"):
        play(
            SearchEnv(TASK, retriever=Shelf(RetrievalError("no answer in 30 s"))),
            "<search> alpha </search>",
        )


def test_a_query_that_holds_another_tag_is_a_query() -> None:
    shelf = Shelf()
    play(SearchEnv(TASK, retriever=shelf), "<search> a <read>1</read> </search>")
    assert shelf.searches == [("a <read>1</read>", 3)]


def test_a_run_ends_if_no_retriever_answers() -> None:
    with pytest.raises(
        Unusable, match="nobody answers; start the retriever, then start the run again"
    ):
        play(
            SearchEnv(TASK, retriever=Shelf(NoRetriever("nobody answers"))),
            "<search> alpha </search>",
        )


def test_a_refused_query_is_an_invalid_search() -> None:
    (step,) = play(
        SearchEnv(TASK, retriever=Shelf(BadRequest("not valid Unicode"))),
        "<search> alpha </search>",
    )
    assert step.observation == "<information> </information>"
    assert step.metrics == {"searches": 0.0, "invalid_searches": 1.0}


def test_reset_clears_the_counts() -> None:
    env = SearchEnv(TASK, retriever=Shelf())
    play(env, "", "<search> alpha </search>")
    (step,) = play(env, "")
    assert step.metrics == {"searches": 0.0, "invalid_searches": 1.0}


def test_a_preview_changes_no_count() -> None:
    shelf = Shelf()

    async def run() -> None:
        env = SearchEnv(TASK, retriever=shelf, top_k=2, style="text")
        env.reset(TASK)
        ahead = await env.preview("<answer>harbor</answer>")
        # precision 1, recall 1/2
        assert ahead.metrics == {
            "searches": 0,
            "invalid_searches": 0,
            "exact_match": 0.0,
            "token_f1": 2 / 3,
        }
        assert (await env.preview("<search>a</search>")).metrics["searches"] == 1
        search = await env.step("<search>a</search>")
        assert search.metrics == {"searches": 1, "invalid_searches": 0}
        assert search.passages == ("Alpha.", "Beta.")

    asyncio.run(run())


@pytest.mark.parametrize(("reward", "outcome"), [("exact_match", 0.0), ("token_f1", 2 / 3)])
def test_the_outcome_is_the_chosen_score(reward: str, outcome: float) -> None:
    (step,) = play(SearchEnv(TASK, retriever=Shelf(), reward=reward), "<answer>harbor</answer>")
    assert step.reward == outcome
