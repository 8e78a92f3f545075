"""What a team is worth, by hand: no task is dropped for a reply that failed, and failures stand beside the score."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from mcore_mas.equations.statistics import majority_score, pass_at
from mcore_mas.evaluation.measure import Scoreboard, measure, score_rows
from rollout.base.errors import EngineError
from rollout.engines import EngineClient
from rollout.engines.prompt_length import fit_prompt
from rollout.environments.protocol import Step
from rollout.records.trajectory import Message, Status, Trajectory
from rollout.teams.collect import CollectOptions, Collector, Deadlines
from tests.support.play import SEED, TASK, Bytes, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.virtual_time import run_virtually

TASKS = [replace(TASK, id=name, source=name, prompt=name) for name in ("easy", "hard")]


class Quiz:
    """Right is an answer that says so; the answer given is what votes."""

    def __init__(self, task):
        self.task = task

    def reset(self, task):
        return task.prompt

    async def step(self, action):
        return Step(observation="", reward=float(action == "right"), answer=action, done=True)


async def once(task, team, env):
    reply = await team.act("a", said=env.reset(task))
    await env.step(reply.text)


class Encoding(Bytes):
    """Bytes, of which a text may be cut."""

    def encode(self, text):
        return tuple(text.encode())


def measured(engine, orchestra=once, *, k=16, in_flight=1000, retries=0, client=None, **options):
    """A board of `TASKS`, played on an engine."""

    async def run():
        team = replace(
            make_team(engine),
            policies={"p": EngineClient(engine=engine, renderer=Encoding(), **client or {})},
        )
        board, chosen = Scoreboard(TASKS, k), CollectOptions(**options)
        collector = Collector(
            team=team, make_env=Quiz, orchestra=orchestra, seed=SEED, step=-2, options=chosen
        )
        await measure(board, collector, in_flight=in_flight, retries=retries)
        return board

    return run_virtually(run())


def says(answer):
    """An engine that answers by the prompt."""
    return ScriptedEngine(lambda prompt, _: (*answer(Bytes().decode(prompt)).encode(), 0))


def values(board):
    return {
        (row["dataset"], row["metric"]): (row["value"], row["n"])
        for row in score_rows(board.tasks())
    }


async def one_too_long(task, team, env):
    """The hard task's first trajectory ends in a prompt of 120 tokens."""
    long = task.id == "hard" and team.seed() == TOO_LONG
    reply = await team.act("a", said="x" * 120 if long else task.id)
    await env.step(reply.text)


TOO_LONG = make_team(None).session(SEED, -2, "hard", 0).seed()


def test_a_prompt_that_is_too_long_is_wrong_and_its_task_stays():
    """The audit's numbers: 16 of 16 right, and 15 wrong with one overflow, were avg@16 = 1.0 of one task."""
    engine = says(lambda prompt: "right" if prompt == "easy" else "wrong")
    board = measured(engine, one_too_long, client={"max_length": 200})
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
    assert len(engine.calls) == 31  # the engine was not asked what it would refuse


@pytest.mark.parametrize(
    ("rule", "seen"), [("left", "89abc"), ("right", "01234"), ("middle", "01abc")]
)
def test_a_prompt_is_cut_by_the_stated_side(rule, seen):
    messages = (Message(role="system", content="s"), Message(role="user", content="0123456789abc"))
    shown, ids = fit_prompt(Encoding(), messages, 7, rule)
    assert [message.content for message in shown] == ["s", seen]
    assert bytes(ids) == f"s\n{seen}".encode()
    assert fit_prompt(Encoding(), messages, 15, rule) == (messages, tuple(b"s\n0123456789abc"))


def test_what_is_cut_is_played_and_counted():
    engine = says(lambda prompt: "right")
    board = measured(engine, one_too_long, client={"max_length": 200, "overlong_prompts": "left"})
    assert board.counts() == {"replies": 32, "overlong": 0, "cut": 1, "failed": {}}
    assert sorted({len(prompt) for prompt, _ in engine.calls}) == [4, 101]  # 200 - 99 of the reply
    assert values(board)["all", "avg@16"] == (1.0, 2)


class Flaky:
    """Fails the first `failures` calls of the hard task, and says what is right to the easy one only."""

    def __init__(self, failures):
        self.failures = failures
        self.seeds = []  # of every call of the hard task
        self.busy = self.busiest = 0
        self._scripted = says(lambda prompt: "right" if prompt == "easy" else "wrong")

    async def generate(self, prompt_ids, sampling):
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(1)
            if bytes(prompt_ids) == b"hard":
                self.seeds.append(sampling.seed)
            if bytes(prompt_ids) == b"hard" and self.failures:
                self.failures -= 1
                raise EngineError("gone")
            return await self._scripted.generate(prompt_ids, sampling)
        finally:
            self.busy -= 1


def test_what_failed_is_played_again_with_the_same_seeds():
    engine = Flaky(6)
    board = measured(engine, k=4, retries=2)  # 4, then 2 of 4
    assert values(board)["all", "avg@4"] == (0.5, 2)
    assert (board.counts()["failed"], board.losses()) == ({}, "")
    assert sorted(Counter(engine.seeds).values()) == [2, 2, 3, 3]  # four seeds, whatever failed


def test_what_fails_every_time_is_left_out_of_its_task_and_counted_by_reason():
    board = measured(Flaky(3), k=4)
    [easy, hard] = board.tasks()
    assert easy["scores"] == [1.0] * 4
    assert Counter(hard["scores"]) == {None: 3, 0.0: 1}
    assert values(board)["all", "avg@4"] == (0.5, 2)
    assert board.counts()["failed"] == {"EngineError": 3}
    assert board.losses().startswith(
        "3 of 8 trajectories are lost (3 EngineError); the first, -2/hard/"
    )
    assert board.losses().endswith(": EngineError: gone")
    half = 12.7062 * 0.5**0.5 / 2**0.5  # t of one degree of freedom, and the deviation of 1 and 0
    assert board.metrics() == {
        "failed": 3.0, "easy/accuracy": 1.0, "hard/accuracy": 0.0, "accuracy": 0.5, "valid_ratio": 0.0,
        "ci_low": pytest.approx(0.5 - half), "ci_high": pytest.approx(0.5 + half),
    }  # fmt: skip


def test_a_task_of_which_nothing_is_known_has_no_score():
    board = measured(Flaky(99), k=4, retries=1)
    assert [task["metrics"].get("avg@4") for task in board.tasks()] == [1.0, None]
    assert values(board) == {
        ("easy", "avg@4"): (1.0, 1),
        ("easy", "pass@4"): (1.0, 1),
        ("easy", "maj@4"): (1.0, 1),
    } | {("all", f"{name}@4"): (1.0, 1) for name in ("avg", "pass", "maj")}
    assert Scoreboard(TASKS, 2).metrics() == {"failed": 0.0}


def test_no_more_are_under_way_than_may_be_and_none_is_late_for_having_waited():
    engine = Flaky(0)
    board = measured(
        engine, k=50, in_flight=8, client={"deadline_s": 2}, deadlines=Deadlines(trajectory_s=2)
    )
    assert engine.busiest == 8
    assert board.counts()["failed"] == {}


def test_a_bug_of_the_orchestra_is_counted_in_a_measurement():
    async def broken(task, team, env):
        raise ZeroDivisionError("a bug")

    board = measured(says(str), broken)
    assert board.counts()["failed"] == {"quarantined": board.replies}


def trajectory(task, sample, outcome, answer, **more):
    return Trajectory(
        id=f"{task}/{sample}", task_id=task, source=task, sample=sample, step=0, turns=(), outcome=outcome,
        answer=answer, **more,
    )  # fmt: skip


def test_the_most_frequent_answer_is_worth_what_it_scored():
    board = Scoreboard(TASKS, 5)
    for sample, answer in enumerate(
        ["7", "3", "3", "7", ""]
    ):  # two each: the first in the group, which is wrong
        board.add(trajectory("easy", sample, float(answer == "3"), answer))
    for sample, answer in enumerate(["", "", "", "4", "4"]):  # what gave no answer does not vote
        board.add(trajectory("hard", sample, float(answer == "4"), answer))
    assert values(board)["easy", "maj@5"] == (0.0, 1)
    assert values(board)["hard", "maj@5"] == (1.0, 1)
    assert values(board)["all", "avg@5"] == (0.4, 2)


def test_without_answers_nobody_votes():
    board = Scoreboard(TASKS[:1], 1)
    board.add(trajectory("easy", 0, 1.0, None))
    assert set(values(board)) == {("easy", "avg@1"), ("easy", "pass@1")}
    assert majority_score(["", None], [1.0, 1.0]) == 0.0


def test_a_task_whose_replies_are_all_too_long_is_wrong_by_majority_too():
    board = Scoreboard([replace(task, source="quiz") for task in TASKS], 2)
    for sample in range(2):
        board.add(trajectory("easy", sample, 1.0, "4"))
        board.add(
            trajectory(
                "hard",
                sample,
                None,
                None,
                status=Status.FAILED,
                error="long",
                metrics={"overlong": 1.0},
            )
        )
    assert values(board) == {("quiz", metric): (0.5, 2) for metric in ("avg@2", "pass@2", "maj@2")}


@pytest.mark.parametrize("scores", [[1, 0, 0, 1, 0, 0], [0.2, 0.9, 0.5, 0.5], [0, 0], [1, 1, 1]])
def test_pass_at_k_is_the_mean_best_of_all_draws(scores):
    for k in range(1, len(scores) + 1):
        assert pass_at(scores, k) == pytest.approx(
            fmean(max(draw) for draw in combinations(scores, k))
        )


def test_pass_at_k_of_right_and_wrong_is_chens():
    # 1 - C(n-c, k) / C(n, k) with n = 16, c = 3, k = 4: 1 - 715 / 1820
    assert pass_at([1.0] * 3 + [0.0] * 13, 4) == pytest.approx(
        1 - math.comb(13, 4) / math.comb(16, 4)
    )
    assert pass_at([1.0] * 3 + [0.0] * 13, 4) == pytest.approx(0.607143, abs=1e-6)


def test_a_later_trajectory_takes_the_place_of_one_that_failed():
    board = Scoreboard(TASKS[:1], 1)
    board.add(trajectory("easy", 0, None, None, status=Status.FAILED, error="EngineError: gone"))
    assert board.missing() == [(TASKS[0], 0)]
    board.add(trajectory("easy", 0, 1.0, "4"))
    assert (board.missing(), board.losses()) == ([], "")


def test_replies_beyond_k_are_not_counted():
    """An evaluation of four replies, asked again for one: what the others failed with is not this one's."""
    board = Scoreboard(TASKS[:1], 1)
    board.add(trajectory("easy", 0, 1.0, "4"))
    for sample in range(1, 4):
        board.add(
            trajectory("easy", sample, None, None, status=Status.FAILED, error="EngineError: gone")
        )
    assert board.counts() == {"replies": 1, "overlong": 0, "cut": 0, "failed": {}}
    assert board.losses() == ""
