"""Trees with branches that fail, are late, or do not repeat deterministically."""

from __future__ import annotations

import asyncio
import re

from rollout.base.errors import EnvError, Undecided
from rollout.environments.protocol import Step
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Status
from rollout.teams.collect import Deadlines
from rollout.teams.tree import Branching
from tests.support.error_texts import without_location
from tests.support.play import SEED, STEP, Adder, seeded
from tests.support.trees import DUET, Refusing, duet, grow, handle_failure, rows


def test_a_failed_branch_is_dropped_and_counted():
    replies = {
        ("a", 0, ""): "1",
        ("a", 0, "2"): "boom",
        ("b", 1, ""): "4",
        ("b", 1, "0.1"): "2",
        ("b", 1, "0.2"): "3",
    }
    trajectory = grow(duet, Refusing(replies, ("a", 0, "1")), Branching(width=3))
    assert trajectory.status is Status.COMPLETED
    assert [turn.node for turn in trajectory.turns] == ["0", "0.0", "0.1", "0.2"]
    assert trajectory.leaf == "0.0"
    assert trajectory.metrics == {
        "total": 5.0,
        "dropped_branches/EngineError": 1.0,
        "dropped_branches/EnvError": 1.0,
    }


def test_the_first_branch_may_fail_too():
    replies = {("a", 0, "1"): "1", ("b", 1, "1.0"): "4", ("b", 1, "1.1"): "2"}
    trajectory = grow(duet, Refusing(replies, ("a", 0, "")), Branching(width=2))
    assert [turn.node for turn in trajectory.turns] == ["1", "1.0", "1.1"]
    assert trajectory.outcome == 5.0


def test_the_trajectory_fails_if_all_branches_fail():
    replies = {("a", 0, ""): "1", ("a", 0, "1"): "0"}
    trajectory = grow(duet, Refusing(replies, ("b", 1, ""), ("b", 1, "0.1")), Branching(width=2))
    assert (trajectory.status, trajectory.error) == (Status.FAILED, "EngineError: no room")
    assert trajectory.outcome is None
    assert trajectory.metrics["dropped_branches/EngineError"] == 2.0
    assert [turn.node for turn in trajectory.turns] == ["0", "1"]


def test_the_failure_reason_is_that_of_the_trajectory_and_not_of_a_dropped_branch():
    class Doubting(Adder):
        async def step(self, action):
            if action == "doubt":
                raise Undecided("nobody knows")
            return await super().step(action)

    # In the second round the policy fails in the leading branch, and the answer of the other is undecided.
    replies = {("a", 0, ""): "1", ("a", 0, "1"): "0", ("b", 1, "0.1"): "doubt"}
    engine = Refusing(replies, ("b", 1, ""))
    trajectory = grow(duet, engine, Branching(width=2), make_env=Doubting)
    assert (trajectory.status, trajectory.error) == (Status.FAILED, "EngineError: no room")
    assert trajectory.metrics["undecided"] == 1.0
    assert trajectory.failure_reason == "EngineError"


def test_a_failure_that_the_orchestra_handles_is_repeated_in_its_branches():
    replies = {("b", 1, ""): "1", ("b", 1, "0.1"): "2"}
    trajectory = grow(
        handle_failure, Refusing(replies, ("a", 0, ""), ("a", 0, "1")), Branching(width=2)
    )
    assert rows(trajectory) == [("0.0", 1, "b", "1", 1.0), ("0.1", 1, "b", "2", 2.0)]
    assert trajectory.status is Status.COMPLETED


def test_a_nondeterministic_environment_is_an_error():
    environments = []

    class Nondeterministic(Adder):
        def __init__(self, task):
            super().__init__(task)
            environments.append(self)
            self.number = len(environments)

        async def step(self, action):
            step = await super().step(action)
            return Step(observation=f"{self.number}", reward=step.reward)

    trajectory = grow(duet, seeded(DUET)[0], Branching(width=3), make_env=Nondeterministic)
    assert trajectory.status is Status.FAILED
    assert re.fullmatch(
        r"BranchError: environment or orchestra of task t is not deterministic: cannot branch "
        r"\(with the same replies, the orchestra waits for b \(turn 1, digest of messages (\w{16})\) "
        r"instead of b \(turn 1, digest of messages (?!\1)\w{16}\)\)",
        trajectory.error,
    )
    assert [turn.node for turn in trajectory.path] == ["1"]


def test_a_nondeterministic_orchestra_is_an_error():
    plays = iter(range(100))

    async def orchestra(task, team, env):
        reply = await team.act("a" if next(plays) else "b", said="x")
        await env.step(reply.text)

    trajectory = grow(orchestra, seeded({})[0], Branching(width=2))
    assert re.search(
        r"the orchestra waits for a \(turn 0, digest of messages (\w+)\) "
        r"instead of b \(turn 0, digest of messages \1\)",
        trajectory.error,
    )


def test_an_environment_that_fails_in_a_replay_drops_that_branch():
    environments = []

    class Frail(Adder):
        def __init__(self, task):
            super().__init__(task)
            environments.append(self)
            self.fails = len(environments) == 3  # the first environment of a replay

        async def step(self, action):
            if self.fails:
                raise EnvError("worn out")
            return await super().step(action)

    replies = {("a", 0, ""): "1", ("a", 0, "1"): "0", ("b", 1, ""): "4"}
    trajectory = grow(duet, seeded(replies)[0], Branching(width=2), make_env=Frail)
    assert [turn.node for turn in trajectory.turns] == ["0", "1", "0.0"]
    assert trajectory.metrics == {"total": 5.0, "dropped_branches/EnvError": 1.0}


def test_a_bug_drops_its_branch_or_fails_the_tree_if_all_branches_have_it():
    async def orchestra(task, team, env):
        reply = await team.act("a", said="x")
        await env.step(reply.text)
        if reply.text == bad or bad == "both":
            raise ZeroDivisionError(f"a bug after {reply.text}")

    for bad, error in (("2", ""), ("both", "Defect: orchestra: ZeroDivisionError: a bug after 1")):
        engine = seeded({("a", 0, ""): "1", ("a", 0, "1"): "2"})[0]
        trajectory = grow(orchestra, engine, Branching(width=2))
        assert without_location(trajectory.error) == error
        assert trajectory.metrics["dropped_branches/Defect"] == (1.0 if bad == "2" else 2.0)


def test_a_late_branch_ends_the_tree():
    inner, _ = seeded(DUET)

    class Late:
        async def generate(self, prompt_ids, sampling):
            if sampling.seed == derive_seed(SEED, STEP, "t", 0, "b", 1, "1.2"):
                await asyncio.sleep(60)
            return await inner.generate(prompt_ids, sampling)

    trajectory = grow(duet, Late(), Branching(width=3), deadlines=Deadlines(trajectory_s=0.5))
    assert trajectory.status is Status.LATE
    assert (
        trajectory.error
        == "the trajectory's deadline of 0.5 s passed while it waited for b (turn 1)"
    )
    assert trajectory.leaf == "1.0"
