"""Scores of a team, compared with values by hand."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from mcore_mas.equations.statistics import majority_score, pass_at
from mcore_mas.evaluation.measure import Scoreboard, describe_scores, measure, score_rows
from rollout.base.errors import EngineError
from rollout.engines import EngineClient
from rollout.engines.prompt_length import fit_prompt
from rollout.environments.protocol import Step
from rollout.records.trajectory import Message, Sampling, Status, Task, Trajectory
from rollout.teams.collect import CollectOptions, Collector, Deadlines
from tests.support import played
from tests.support.play import SEED, TASK, Bytes, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.virtual_time import run_virtually

EVALUATION_STEP = -2
EASY, HARD = (replace(TASK, id=name, source=name, prompt=name) for name in ("easy", "hard"))
TASKS = [EASY, HARD]


class QuizEnv:
    """Environment in which the action "right" is right; every action is an answer that votes."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        return Step(observation="", reward=float(action == "right"), answer=action, done=True)


class EncodingRenderer(Bytes):
    """Renderer over bytes that can cut texts."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())


async def one_turn(task: Task, team: Any, env: Any) -> None:
    reply = await team.act("a", said=env.reset(task))
    await env.step(reply.text)


def measure_tasks(
    engine: Any,
    orchestra: Any = one_turn,
    *,
    k: int = 16,
    in_flight: int = 1000,
    retries: int = 0,
    client: dict[str, Any] | None = None,
    options: CollectOptions | None = None,
) -> Scoreboard:
    """Return the scoreboard of `TASKS`, played on an engine in virtual time.

    Args:
        engine: samples the replies.
        orchestra: of the team.
        k, in_flight, retries: of the measurement.
        client: settings of the engine's client.
        options: of the collection.
    """

    async def run() -> Scoreboard:
        policy = EngineClient(engine=engine, renderer=EncodingRenderer(), **client or {})
        collector = Collector(
            team=replace(make_team(engine), policies={"p": policy}),
            make_env=QuizEnv,
            orchestra=orchestra,
            seed=SEED,
            step=EVALUATION_STEP,
            options=options or CollectOptions(),
        )
        board = Scoreboard(TASKS, k)
        await measure(board, collector, in_flight=in_flight, retries=retries)
        return board

    return run_virtually(run())


def make_engine(answer: Callable[[str], str]) -> ScriptedEngine:
    """Return an engine whose reply is a function of the prompt."""

    def reply(prompt: tuple[int, ...], call: int) -> tuple[int, ...]:
        return (*answer(Bytes().decode(prompt)).encode(), 0)

    return ScriptedEngine(reply)


def answer_easy(prompt: str) -> str:
    return "right" if prompt == "easy" else "wrong"


def values(board: Scoreboard) -> dict[tuple[str, str], tuple[float, int]]:
    """Return value and number of tasks of each dataset and metric."""
    return {
        (row["dataset"], row["metric"]): (row["value"], row["n"])
        for row in score_rows(board.task_rows())
    }


# First seed of the first trajectory of the hard task.
FIRST_HARD_SEED = make_team(None).session(SEED, EVALUATION_STEP, "hard", 0).seed()


async def one_long_prompt(task: Task, team: Any, env: Any) -> None:
    """Play a turn; in one trajectory of the hard task, its prompt has 120 tokens."""
    is_long = task.id == "hard" and team.seed() == FIRST_HARD_SEED
    reply = await team.act("a", said="x" * 120 if is_long else task.id)
    await env.step(reply.text)


class TestLongPrompts:
    def test_a_prompt_that_is_too_long_is_wrong_and_its_task_counts(self) -> None:
        """Without this rule, 16 right and 15 wrong replies with one overflow gave avg@16 = 1.0."""
        engine = make_engine(answer_easy)
        board = measure_tasks(engine, one_long_prompt, client={"max_length": 200})
        assert values(board) == {
            ("easy", "avg@16"): (1.0, 1),
            ("easy", "pass@16"): (1.0, 1),
            ("easy", "maj@16"): (1.0, 1),
            ("hard", "avg@16"): (0.0, 1),
            ("hard", "pass@16"): (0.0, 1),
            ("hard", "maj@16"): (0.0, 1),
            ("all", "avg@16"): (0.5, 2),
            ("all", "pass@16"): (0.5, 2),
            ("all", "maj@16"): (0.5, 2),
        }
        assert board.counts() == {"replies": 32, "overlong": 1, "cut": 0, "failed": {}}
        assert len(engine.calls) == 31  # the engine does not get the prompt that is too long

    @pytest.mark.parametrize(
        ("rule", "content"), [("left", "89abc"), ("right", "01234"), ("middle", "01abc")]
    )
    def test_a_prompt_is_cut_at_the_stated_side(self, rule: Any, content: str) -> None:
        messages = (
            Message(role="system", content="s"),
            Message(role="user", content="0123456789abc"),
        )
        cut_messages, ids = fit_prompt(EncodingRenderer(), messages, 7, rule)
        assert [message.content for message in cut_messages] == ["s", content]
        assert bytes(ids) == f"s\n{content}".encode()
        whole = (messages, tuple(b"s\n0123456789abc"))
        assert fit_prompt(EncodingRenderer(), messages, 15, rule) == whole

    def test_cut_prompts_are_played_and_counted(self) -> None:
        engine = make_engine(lambda prompt: "right")
        client = {"max_length": 200, "overlong_prompts": "left"}
        board = measure_tasks(engine, one_long_prompt, client=client)
        assert board.counts() == {"replies": 32, "overlong": 0, "cut": 1, "failed": {}}
        prompt_lengths = {len(prompt) for prompt, _ in engine.calls}
        assert prompt_lengths == {4, 101}  # 200 tokens less 99 of the reply
        assert values(board)["all", "avg@16"] == (1.0, 2)


class FlakyEngine:
    """Engine whose first calls for the hard task fail; only its replies to the easy one are right.

    Attributes:
        seeds: of every call for the hard task.
        max_running: largest number of concurrent calls.
    """

    def __init__(self, failures: int) -> None:
        self.seeds: list[int] = []
        self.max_running = 0
        self._running = 0
        self._failures = failures
        self._engine = make_engine(answer_easy)

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Any:
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        try:
            await asyncio.sleep(1)
            if bytes(prompt_ids) == b"hard":
                self.seeds.append(sampling.seed)
                if self._failures:
                    self._failures -= 1
                    raise EngineError("gone")
            return await self._engine.generate(prompt_ids, sampling)
        finally:
            self._running -= 1


class TestFailures:
    def test_failed_replies_are_played_again_with_their_seeds(self) -> None:
        engine = FlakyEngine(failures=6)  # 4 in the first round, 2 in the second
        board = measure_tasks(engine, k=4, retries=2)
        assert values(board)["all", "avg@4"] == (0.5, 2)
        assert board.counts()["failed"] == {}
        assert board.describe_losses() == ""
        assert sorted(Counter(engine.seeds).values()) == [2, 2, 3, 3]

    def test_replies_that_always_fail_are_left_out_of_their_task_and_counted(self) -> None:
        board = measure_tasks(FlakyEngine(failures=3), k=4)
        easy, hard = board.task_rows()
        assert easy["scores"] == [1.0] * 4
        assert Counter(hard["scores"]) == {None: 3, 0.0: 1}
        assert values(board)["all", "avg@4"] == (0.5, 2)
        assert board.counts()["failed"] == {"EngineError": 3}
        losses = board.describe_losses()
        assert losses.startswith("3 of 8 trajectories are lost (3 EngineError); the first, sample ")
        assert losses.endswith(": EngineError: gone")

        # quantile of t with one degree of freedom, and the standard error of 1 and 0
        assert board.metrics() == {
            "failed": 3.0,
            "easy/accuracy": 1.0,
            "hard/accuracy": 0.0,
            "accuracy": 0.5,
            "valid_ratio": 0.0,
            # Student's t of two values, 12.7062, leaves the range of an accuracy.
            "ci_low": 0.0,
            "ci_high": 1.0,
        }

    def test_a_task_whose_replies_all_fail_has_no_score(self) -> None:
        board = measure_tasks(FlakyEngine(failures=99), k=4, retries=1)
        assert [row["metrics"].get("avg@4") for row in board.task_rows()] == [1.0, None]
        assert values(board) == {
            (dataset, f"{metric}@4"): (1.0, 1)
            for dataset in ("easy", "all")
            for metric in ("avg", "pass", "maj")
        }
        assert Scoreboard(TASKS, 2).metrics() == {"failed": 0.0}

    def test_a_bug_of_the_orchestra_counts_as_quarantined(self) -> None:
        async def broken(task: Task, team: Any, env: Any) -> None:
            raise ZeroDivisionError("a bug")

        board = measure_tasks(make_engine(str), broken)
        assert board.counts()["failed"] == {"quarantined": board.expected_replies}


def test_trajectories_in_flight_are_bounded_and_waiting_ones_are_not_late() -> None:
    engine = FlakyEngine(failures=0)
    options = CollectOptions(deadlines=Deadlines(trajectory_s=2))
    board = measure_tasks(engine, k=50, in_flight=8, client={"deadline_s": 2}, options=options)
    assert engine.max_running == 8
    assert board.counts()["failed"] == {}


def scored(task: Task, sample: int, score: float, answer: str | None) -> Trajectory:
    """Return a trajectory that was completed."""
    return played.trajectory(
        id=f"{task.id}/{sample}", task_id=task.id, sample=sample, outcome=score, answer=answer
    )


def failed(task: Task, sample: int, **fields: Any) -> Trajectory:
    """Return a trajectory that failed."""
    return played.trajectory(
        id=f"{task.id}/{sample}",
        task_id=task.id,
        sample=sample,
        outcome=None,
        status=Status.FAILED,
        error="EngineError: gone",
        **fields,
    )


class TestVotes:
    def test_the_most_frequent_answer_is_worth_its_score(self) -> None:
        board = Scoreboard(TASKS, 5)
        # two votes each: the first of the two counts, which is wrong
        for sample, answer in enumerate(["7", "3", "3", "7", ""]):
            board.add(scored(EASY, sample, float(answer == "3"), answer))
        # replies without an answer do not vote
        for sample, answer in enumerate(["", "", "", "4", "4"]):
            board.add(scored(HARD, sample, float(answer == "4"), answer))
        assert values(board)["easy", "maj@5"] == (0.0, 1)
        assert values(board)["hard", "maj@5"] == (1.0, 1)
        assert values(board)["all", "avg@5"] == (0.4, 2)

    def test_without_answers_there_is_no_vote(self) -> None:
        board = Scoreboard([EASY], 1)
        board.add(scored(EASY, 0, 1.0, None))
        assert set(values(board)) == {("easy", "avg@1"), ("easy", "pass@1")}
        assert majority_score(["", None], [1.0, 1.0]) == 0.0

    def test_a_task_whose_prompts_are_all_too_long_is_wrong_by_vote_too(self) -> None:
        tasks = [replace(task, source="quiz") for task in TASKS]
        board = Scoreboard(tasks, 2)
        for sample in range(2):
            board.add(scored(EASY, sample, 1.0, "4"))
            board.add(failed(HARD, sample, metrics={"overlong": 1.0}))
        assert values(board) == {
            ("quiz", metric): (0.5, 2) for metric in ("avg@2", "pass@2", "maj@2")
        }


class TestPassAtK:
    @pytest.mark.parametrize(
        "scores", [[1, 0, 0, 1, 0, 0], [0.2, 0.9, 0.5, 0.5], [0, 0], [1, 1, 1]]
    )
    def test_it_is_the_mean_best_of_all_draws(self, scores: list[float]) -> None:
        for k in range(1, len(scores) + 1):
            best = [max(draw) for draw in combinations(scores, k)]
            assert pass_at(scores, k) == pytest.approx(fmean(best))

    def test_for_right_and_wrong_it_is_the_estimator_of_chen_et_al(self) -> None:
        # 1 - C(n-c, k) / C(n, k) with n = 16, c = 3, k = 4: 1 - 715 / 1820
        expected = 1 - math.comb(13, 4) / math.comb(16, 4)
        assert expected == pytest.approx(0.607143, abs=1e-6)
        assert pass_at([1.0] * 3 + [0.0] * 13, 4) == pytest.approx(expected)


def test_a_later_trajectory_replaces_one_that_failed() -> None:
    board = Scoreboard([EASY], 1)
    board.add(failed(EASY, 0))
    assert board.missing() == [(EASY, 0)]
    board.add(scored(EASY, 0, 1.0, "4"))
    assert board.missing() == []
    assert board.describe_losses() == ""


def test_replies_beyond_k_are_not_counted() -> None:
    """An evaluation with k = 1 ignores the failures of an earlier one with k = 4."""
    board = Scoreboard([EASY], 1)
    board.add(scored(EASY, 0, 1.0, "4"))
    for sample in range(1, 4):
        board.add(failed(EASY, sample))
    assert board.counts() == {"replies": 1, "overlong": 0, "cut": 0, "failed": {}}
    assert board.describe_losses() == ""


def test_scores_are_described_in_percent() -> None:
    row = {"metric": "avg@4", "value": 0.8075, "ci_low": 0.7, "ci_high": 0.9, "tasks": 5}
    rows = [{"dataset": "gsm8k", **row}, {"dataset": "all", **row, "value": 0.25}]
    assert describe_scores(rows) == [
        "gsm8k  avg@4: 80.8 % [70.0, 90.0]",
        "all  avg@4: 25.0 % [70.0, 90.0]",
    ]
