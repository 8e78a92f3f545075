"""Replays: alternatives of each turn, the outcomes of their replays, and the advantages of C3."""

from __future__ import annotations

import asyncio
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages, mean_advantages
from mcore_mas.credit.samples import to_samples
from rollout.environments.protocol import Step
from rollout.records.call_record import CallRecord
from rollout.records.collection_log import CollectionLog
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.allocation import shared_outcome
from rollout.teams.replays import ReplayPlan
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team, seeded
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trees import Refusing, duet, handle_failure


def plan(alternatives: int, budget: int | None = None, agents: str = "ab") -> ReplayPlan:
    return ReplayPlan(agents=set(agents), alternatives=alternatives, budget=budget)


def play(orchestra: Any, engine: object, replays: ReplayPlan | None, **options: Any) -> Trajectory:
    """Return a trajectory of `TASK`; its collection must leave no asyncio task."""

    async def run() -> Trajectory:
        [group] = await collect(
            [TASK],
            make_team(engine),
            options.pop("make_env", Adder),
            orchestra,
            group_size=1,
            seed=SEED,
            step=STEP,
            replays=replays,
            **options,
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return group.trajectories[0]

    return asyncio.run(run())


def alternatives(trajectory: Trajectory) -> list[tuple[str, str, str, float, float, float]]:
    """Return (agent, node, text, outcome, turns sampled again, turns repeated) of every alternative."""
    names = ("replay_outcome", "replay_sampled", "replay_recorded")
    return [
        (turn.agent, turn.node, turn.text, *(turn.scores[name] for name in names))
        for turn in trajectory.turns
        if turn.node
    ]


def advantages(*trajectories: Trajectory) -> dict[tuple[int, str], float]:
    """Return the advantages that c3 gives the turns of a trajectory, by turn and node."""
    samples = to_samples([shared_outcome(Group(task=TASK, trajectories=trajectories))])
    estimator = AdvantageConfig(name="c3")
    credited = add_advantages(samples, {sample.agent: estimator for sample in samples})
    return {(turn, node): value for (_, node, turn), value in mean_advantages(credited).items()}


DUET = {
    ("a", 0, ""): "1",
    ("a", 0, "1"): "5",
    ("a", 0, "2"): "3",
    ("b", 1, ""): "2",
    ("b", 1, "1"): "4",
    ("b", 1, "2"): "4",
}


def test_alternatives_are_sampled_at_every_turn_and_played_to_their_outcome() -> None:
    engine, sampled_calls = seeded(DUET)
    trajectory = play(duet, engine, plan(2))
    assert trajectory.outcome == 3.0
    assert [(turn.index, turn.node) for turn in trajectory.turns] == [
        (0, ""),
        (0, "1"),
        (0, "2"),
        (1, ""),
        (1, "1"),
        (1, "2"),
    ]
    assert alternatives(trajectory) == [
        ("a", "1", "5", 7.0, 1.0, 0.0),  # b reads another sum: it is asked again, with its seed
        ("a", "2", "3", 5.0, 1.0, 0.0),
        ("b", "1", "4", 5.0, 0.0, 0.0),
        ("b", "2", "4", 5.0, 0.0, 0.0),
    ]
    # 3 replies of a, and of b its own, two after alternatives of a, and two alternatives
    assert sorted(sampled_calls()) == sorted([*DUET, ("b", 1, ""), ("b", 1, "")])
    assert trajectory.metrics["replayed_tokens"] == 4.0  # "2" and the end of the reply, twice


def test_the_advantage_is_the_outcome_minus_the_mean_of_the_other_replies() -> None:
    trajectory = play(duet, seeded(DUET)[0], plan(2))
    expected = {
        (0, ""): 3 - (7 + 5) / 2,
        (0, "1"): 7 - (3 + 5) / 2,
        (0, "2"): 5 - (3 + 7) / 2,
        (1, ""): 3 - (5 + 5) / 2,
        (1, "1"): 5 - (3 + 5) / 2,
        (1, "2"): 5 - (3 + 5) / 2,
    }
    assert advantages(trajectory) == pytest.approx(expected)


def test_the_trajectory_is_that_of_a_run_without_replays() -> None:
    with_replays = play(duet, seeded(DUET)[0], plan(2))
    assert with_replays.path == play(duet, seeded(DUET)[0], None).turns


def test_only_the_agents_of_the_plan_are_replayed() -> None:
    assert {row[0] for row in alternatives(play(duet, seeded(DUET)[0], plan(1, agents="b")))} == {
        "b"
    }


async def with_free_rider(task: Task, team: Any, env: Any) -> None:
    """Play turns of which nobody reads the reply of b."""
    draft = await team.act("a", said="draft")
    await team.act("b", said="comment")
    final = await team.act("a", said=draft.text)
    await env.step(final.text)


def test_an_agent_that_nobody_reads_gets_exactly_nothing() -> None:
    replies = {("a", 0, ""): "1", ("b", 1, ""): "0.1", ("a", 2, ""): "0.3"}
    replies |= {("a", 0, node): "7" for node in "12"}
    replies |= {("b", 1, node): f"0.{node}7" for node in "12"}
    replies |= {("a", 2, node): "0.7" for node in "12"}
    engine, sampled_calls = seeded(replies)
    trajectory = play(with_free_rider, engine, plan(2))
    of_free_rider = [row for row in alternatives(trajectory) if row[0] == "b"]
    assert [row[3:] for row in of_free_rider] == [(0.3, 0.0, 1.0)] * 2
    credit = advantages(trajectory)
    assert [credit[1, node] for node in ("", "1", "2")] == [0.0, 0.0, 0.0]
    assert credit[2, ""] == pytest.approx(0.3 - 0.7)
    # The call of b is unchanged by the alternatives of a: it is never asked again.
    assert sampled_calls().count(("b", 1, "")) == 1
    assert sampled_calls().count(("a", 2, "")) == 1 + 2


async def with_verifier(task: Task, team: Any, env: Any) -> None:
    """Play a turn of a, and another one if b does not approve."""
    answer = await team.act("a", said="solve")
    verdict = await team.act("b", said=answer.text)
    if not verdict.text.startswith("1"):
        answer = await team.act("a", said=f"{answer.text} {verdict.text}")
    await env.step(answer.text)


def test_a_verifier_that_always_approves_gets_exactly_nothing() -> None:
    replies = {("a", 0, ""): "0.1", ("b", 1, ""): "1", ("a", 0, "1"): "0.7", ("b", 1, "1"): "1.5"}
    credit = advantages(play(with_verifier, seeded(replies)[0], plan(1)))
    assert (credit[1, ""], credit[1, "1"]) == (0.0, 0.0)
    assert credit[0, ""] == pytest.approx(0.1 - 0.7)


def test_a_verifier_that_finds_the_error_is_credited() -> None:
    replies = {
        ("a", 0, ""): "0",
        ("a", 0, "1"): "0",
        ("b", 1, ""): "2",
        ("a", 2, ""): "9",
        ("b", 1, "1"): "1",
        ("a", 2, "1"): "9",
    }
    credit = advantages(play(with_verifier, seeded(replies)[0], plan(1)))
    assert (credit[1, ""], credit[1, "1"]) == (9.0, -9.0)


def test_agents_that_speak_at_the_same_time_are_replayed_one_by_one() -> None:
    async def orchestra(task: Task, team: Any, env: Any) -> None:
        pair = await asyncio.gather(team.act("a", said="x"), team.act("b", said="y"))
        final = await team.act("a", said=" ".join(reply.text for reply in pair))
        await env.step(str(sum(float(reply.text) for reply in (*pair, final))))

    replies = {("a", 0, ""): "1", ("b", 1, ""): "2", ("a", 2, ""): "0"}
    replies |= {("a", 0, "1"): "10", ("b", 1, "1"): "20", ("a", 2, "1"): "100"}
    trajectory = play(orchestra, seeded(replies)[0], plan(1))
    assert alternatives(trajectory) == [
        ("a", "1", "10", 12.0, 1.0, 0.0),
        ("b", "1", "20", 21.0, 1.0, 0.0),
        ("a", "1", "100", 103.0, 0.0, 0.0),
    ]


def test_an_alternative_equal_to_the_reply_repeats_the_rest() -> None:
    engine, sampled_calls = seeded({**DUET, ("a", 0, "1"): "1"})
    trajectory = play(duet, engine, plan(1))
    assert alternatives(trajectory)[0] == ("a", "1", "1", 3.0, 0.0, 1.0)
    assert sampled_calls().count(("b", 1, "")) == 1


@pytest.mark.parametrize(
    ("budget", "nodes"),
    [
        (1, 1),
        (2, 2),
        (3, {"a": 2, "b": 1}),  # outcomes 3 and 7 vary more than 3 and 5
        (5, {"a": 3, "b": 2}),
        (9, {"a": 3, "b": 3}),
    ],
)
def test_a_budget_is_spent_where_the_outcomes_vary_most(budget: int, nodes: Any) -> None:
    replies = {**DUET, ("a", 0, "3"): "3", ("b", 1, "3"): "0"}
    rows = alternatives(play(duet, seeded(replies)[0], plan(3, budget)))
    counts = {agent: sum(row[0] == agent for row in rows) for agent in "ab"}
    if isinstance(nodes, int):
        assert len(rows) == nodes
        assert max(counts.values()) == 1
    else:
        assert counts == nodes


def test_a_budget_is_not_spent_on_equal_outcomes() -> None:
    replies = {("a", 0, ""): "1", ("b", 1, ""): "0", ("a", 2, ""): "3"}
    replies |= {("a", 0, node): "7" for node in "1234"}
    replies |= {("b", 1, node): "5" for node in "1234"}
    replies |= {("a", 2, node): "4" for node in "1234"}
    rows = alternatives(play(with_free_rider, seeded(replies)[0], plan(4, 12)))
    # The first turn is read by the last one, whose reply the script does not change.
    assert [(row[0], row[1]) for row in rows] == [
        ("a", "1"),
        ("b", "1"),
        *(("a", node) for node in "1234"),
    ]


def test_a_replay_that_fails_is_dropped_and_counted() -> None:
    trajectory = play(duet, seeded({**DUET, ("b", 1, "1"): "boom"})[0], plan(2))
    assert [row[:2] for row in alternatives(trajectory)] == [("a", "1"), ("a", "2"), ("b", "2")]
    assert trajectory.metrics["dropped_branches/EnvError"] == 1.0
    assert trajectory.status is Status.COMPLETED
    assert advantages(trajectory)[1, ""] == 3 - 5


def test_an_alternative_that_the_policy_refuses_is_dropped_though_the_orchestra_goes_on() -> None:
    replies = {("a", 0, ""): "1", ("b", 1, ""): "2", ("b", 1, "1"): "3"}
    trajectory = play(handle_failure, Refusing(replies, ("a", 0, "1")), plan(1))
    assert alternatives(trajectory) == [("b", "1", "3", 3.0, 0.0, 0.0)]
    assert trajectory.metrics["dropped_branches/EngineError"] == 1.0
    assert (trajectory.status, trajectory.outcome) == (Status.COMPLETED, 2.0)


def test_a_failed_trajectory_is_not_replayed() -> None:
    engine, sampled_calls = seeded({**DUET, ("b", 1, ""): "boom"})
    trajectory = play(duet, engine, plan(2))
    assert trajectory.status is Status.FAILED
    assert sorted(sampled_calls()) == [("a", 0, ""), ("b", 1, "")]


def test_an_orchestra_that_is_not_deterministic_is_refused() -> None:
    plays = iter(range(9))

    async def orchestra(task: Task, team: Any, env: Any) -> None:
        name = "ab"[min(next(plays), 1)]
        reply = await team.act(name, said="x")
        await env.step(reply.text)

    trajectory = play(orchestra, seeded({("a", 0, ""): "1"})[0], plan(1))
    assert trajectory.status is Status.FAILED
    assert trajectory.error.startswith(
        "BranchError: environment or orchestra of task t is not deterministic: cannot branch (with the "
        "same replies, the orchestra waits for b (turn 0, digest of messages "
    )


async def with_optional_comment(task: Task, team: Any, env: Any) -> None:
    """Orchestra whose answer is the reply of a, and that of b if it is not empty."""
    answer = await team.act("a", said="solve")
    comment = await team.act("b", said="comment")
    await env.step(comment.text or answer.text or "-1")


def test_the_value_of_a_turn_by_removal_is_the_outcome_minus_that_with_an_empty_reply() -> None:
    replies = {("a", 0, ""): "5", ("b", 1, ""): "7", ("a", 0, "1"): "5", ("b", 1, "1"): "7"}
    engine, sampled_calls = seeded(replies)
    removal = ReplayPlan(agents={"a", "b"}, alternatives=1, removal=True)
    trajectory = play(with_optional_comment, engine, removal)
    scores = {turn.agent: turn.scores["removal"] for turn in trajectory.path}
    assert scores == {"a": 0.0, "b": 2.0}  # without the comment, the answer is 5
    assert sorted(sampled_calls()) == sorted(replies)  # an empty reply is not sampled
    assert set(advantages(trajectory).values()) == {0.0}
    assert not any("removal" in turn.scores for turn in trajectory.turns if turn.node)


def test_the_tokens_of_a_replay_with_an_empty_reply_are_counted() -> None:
    async def chain(task: Task, team: Any, env: Any) -> None:
        first = await team.act("a", said="choose")
        second = await team.act("b", said=f"after {first.text}")
        await env.step(second.text)

    replies = {("a", 0, ""): "1", ("b", 1, ""): "2", ("a", 0, "1"): "3"}
    plans = [ReplayPlan(agents={"a"}, alternatives=1, removal=removal) for removal in (False, True)]
    tokens = [play(chain, seeded(replies)[0], p).metrics["replayed_tokens"] for p in plans]
    # b replies "2" and the end of the reply after "3", and with `removal` also after an empty reply
    assert tokens == [2.0, 4.0]


def test_a_chat_goes_on_from_the_tokens_of_its_alternative() -> None:
    async def orchestra(task: Task, team: Any, env: Any) -> None:
        chat = team.chat("a")
        first = await chat.say("one?")
        second = await chat.say("two?")
        await env.step(first.text + second.text)

    replies = {("a", 0, ""): "1", ("a", 1, ""): "2", ("a", 0, "1"): "3", ("a", 1, "1"): "4"}
    engine, _ = seeded(replies)
    trajectory = play(orchestra, engine, plan(1))
    assert alternatives(trajectory) == [
        ("a", "1", "3", 32.0, 1.0, 0.0),
        ("a", "1", "4", 14.0, 0.0, 0.0),
    ]
    prompts = {bytes(prompt) for prompt, _ in engine.calls}
    assert prompts == {b"one?", b"one?1\0two?", b"one?3\0two?"}


# Team of two agents whose replies are digits: b reads the digit of a, and is random given it.
_DIGITS = 3


def _digit(prompt: bytes, seed: int) -> int:
    return derive_seed(prompt.decode(), seed) % _DIGITS


def _outcome(first: int, second: int) -> float:
    return float(first * (second + 1) ** 2)


async def pair(task: Task, team: Any, env: Any) -> None:
    first = await team.act("a", said="choose")
    second = await team.act("b", said=f"after {first.text}")
    await env.step(f"{_outcome(int(first.text), int(second.text)):g}")


def _exact_contributions(sample: int) -> list[float]:
    """Return the contribution of both turns: the outcome minus its mean over all digits of the turn.

    The other turn keeps its seed, so that it replies to every digit as in a replay.
    """
    seeds = [
        derive_seed(SEED, STEP, TASK.id, sample, agent, turn) for turn, agent in enumerate("ab")
    ]

    def second_of(first: int) -> int:
        return _digit(f"after {first}".encode(), seeds[1])

    first = _digit(b"choose", seeds[0])
    outcome = _outcome(first, second_of(first))
    without_first = fmean(_outcome(digit, second_of(digit)) for digit in range(_DIGITS))
    without_second = fmean(_outcome(first, digit) for digit in range(_DIGITS))
    return [outcome - without_first, outcome - without_second]


def _error(number: int, samples: int) -> float:
    """Return the root of the mean squared error of the advantages, with so many alternatives."""

    def reply(prompt: tuple[int, ...], call: int) -> tuple[int, ...]:
        return (*str(_digit(bytes(prompt), engine.calls[call][1].seed)).encode(), 0)

    engine = ScriptedEngine(reply)
    [group] = asyncio.run(
        collect(
            [TASK],
            make_team(engine),
            Adder,
            pair,
            group_size=samples,
            seed=SEED,
            step=STEP,
            replays=plan(number),
        )
    )
    squares = []
    for trajectory in group.trajectories:
        credit = advantages(trajectory)
        for turn, exact in enumerate(_exact_contributions(trajectory.sample)):
            squares.append((credit[turn, ""] - exact) ** 2)
    return sqrt(fmean(squares))


def test_the_error_against_enumeration_falls_as_the_root_of_the_alternatives() -> None:
    few = _error(2, 40)
    many = _error(18, 40)
    assert few > 1.0  # outcomes are 0 to 18
    assert few / many == pytest.approx(sqrt(18 / 2), rel=0.25)


class Till(Adder):
    """Environment whose step pays the number in its action by a call outside the run."""

    async def open(self, task: Task, calls: CallRecord) -> None:
        self._calls = calls

    async def close(self) -> None:
        """Close nothing."""

    async def step(self, action: str) -> Step:
        paid = await self._calls.once(float, partial(asyncio.sleep, 0, float(action)), "pay")
        return Step(observation="", reward=paid)


def test_after_a_kill_equal_calls_of_replays_get_their_own_recorded_results(tmp_path: Path) -> None:
    """The call follows the same turn of b in the trajectory and in the replay of a."""

    async def orchestra(task: Task, team: Any, env: Any) -> None:
        draft = await team.act("a", said="draft")
        await team.act("b", said="comment")
        await env.step(draft.text)

    replies = {("a", 0, ""): "1", ("a", 0, "1"): "5", ("b", 1, ""): "0", ("b", 1, "1"): "7"}
    engine, sampled_calls = seeded(replies)
    log = tmp_path / "log.jsonl"

    def replayed() -> Trajectory:
        return play(orchestra, engine, plan(1), make_env=Till, log=CollectionLog(log))

    trajectory = replayed()
    assert [row[3] for row in alternatives(trajectory)] == [5.0, 1.0]
    assert replayed() == trajectory
    assert sorted(sampled_calls()) == sorted(
        replies
    )  # the finished trajectory is read from the log

    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"trajectory":' not in line))
    assert replayed() == trajectory
