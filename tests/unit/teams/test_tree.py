"""Trees: branches, their scores, the branch that continues, and replays."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Status
from rollout.rewards.turn_scores import local_team
from rollout.teams.tree import Branching
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team, seeded
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trees import DUET, duet, grow, rows


def test_the_best_branch_continues_and_every_turn_is_recorded_once():
    engine, requested = seeded(DUET)
    trajectory = grow(duet, engine, Branching(width=3))
    assert rows(trajectory) == [
        ("0", 0, "a", "1", 1.0),
        ("1", 0, "a", "5", 5.0),
        ("2", 0, "a", "3", 3.0),
        ("1.0", 1, "b", "2", 2.0),
        ("1.1", 1, "b", "4", 4.0),
        ("1.2", 1, "b", "4", 4.0),
    ]
    assert (trajectory.leaf, trajectory.outcome, trajectory.metrics) == (
        "1.1",
        9.0,
        {"total": 9.0},
    )  # the first of two equal branches
    assert trajectory.status is Status.COMPLETED
    assert [turn.node for turn in trajectory.path] == ["1", "1.1"]
    assert sorted(requested()) == sorted(DUET)  # replays ask no engine


def test_siblings_have_equal_states_and_scores_of_their_own_steps():
    trajectory = grow(duet, seeded(DUET)[0], Branching(width=3))
    assert len({turn.state_key for turn in trajectory.turns[:3]}) == 1
    assert len({turn.state_key for turn in trajectory.turns[3:]}) == 1
    assert [turn.round for turn in trajectory.turns] == [0, 0, 0, 1, 1, 1]
    assert [(turn.scores["team"], turn.scores["total"]) for turn in trajectory.turns] == [
        (1, 1),
        (5, 5),
        (3, 3),
        (2, 7),
        (4, 9),
        (4, 9),
    ]


def test_the_mixed_reward_compares_branches_by_their_own_round():
    async def orchestra(task, team, env):
        a = await team.act("a", said="x")
        b = await team.act("b", said="y")
        await env.step(str(int(a.text) + int(b.text)))

    replies = {("a", 0, ""): "1", ("a", 0, "1"): "2", ("b", 1, ""): "3", ("b", 1, "0.1"): "5"}
    trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2))
    paid = local_team(Group(task=TASK, trajectories=(trajectory,)), missing_local="zero")
    rewards = {turn.node: turn.reward for turn in paid.trajectories[0].turns}
    assert rewards == {"0": 0.0, "1": 0.0, "0.0": 4.0, "0.1": 6.0}


def test_turns_have_different_seeds_that_another_run_repeats():
    first, second = (grow(duet, seeded(DUET)[0], Branching(width=3)) for _ in range(2))
    assert first == second
    assert len({turn.seed for turn in first.turns}) == 6


def test_local_scores_and_alpha_choose_the_branch():
    async def orchestra(task, team, env):
        reply = await team.act("a", said="x")
        team.score(reply.turn, local=-float(reply.text))
        await env.step(reply.text)

    replies = {("a", 0, ""): "2", ("a", 0, "1"): "6"}
    # branch score: -t + alpha * t
    for alpha, leaf, scores in ((0.5, "0", [-1.0, -3.0]), (2.0, "1", [2.0, 6.0])):
        trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2, alpha=alpha))
        assert trajectory.leaf == leaf
        assert [turn.scores["branch"] for turn in trajectory.turns] == scores


def test_a_reward_before_a_round_does_not_count_for_the_round():
    async def orchestra(task, team, env):
        await env.step("10")
        reply = await team.act("a", said="x")
        await env.step(reply.text)

    trajectory = grow(
        orchestra, seeded({("a", 0, ""): "2", ("a", 0, "1"): "6"})[0], Branching(width=2)
    )
    assert [turn.scores["branch"] for turn in trajectory.turns] == [2.0, 6.0]
    assert trajectory.outcome == 16.0


def test_a_later_step_scores_the_branch_that_continued():
    async def orchestra(task, team, env):
        draft = await team.act("a", said="x")
        await team.act("b", said=draft.text)
        await env.step(draft.text)

    replies = {("a", 0, ""): "2", ("a", 0, "1"): "6", ("b", 1, ""): "0", ("b", 1, "0.1"): "1"}
    trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2))
    assert [(turn.node, turn.scores) for turn in trajectory.turns] == [
        ("0", {"team": 2.0, "total": 2.0, "branch": 0.0}),
        ("1", {"branch": 0.0}),
        ("0.0", {"team": 2.0, "total": 2.0, "branch": 2.0}),
        ("0.1", {"team": 2.0, "total": 2.0, "branch": 2.0}),
    ]


SIMULTANEOUS = {
    ("a", 0, ""): "1",
    ("b", 1, ""): "2",
    ("a", 0, "1"): "3",
    ("b", 1, "1"): "4",
    ("a", 2, "1.0"): "5",
    ("a", 2, "1.1"): "0",
}


async def pair(task, team, env):
    """Play concurrent turns of a and b, a step for each, a turn of a and a step."""

    async def strand(name):
        reply = await team.act(name, said=name)
        await asyncio.sleep(0)
        team.score(reply.turn, local=0.25)
        return (await env.step(reply.text)).observation

    async def nested(name, depth):
        if depth:
            return await asyncio.gather(nested(name, depth - 1))
        return await asyncio.wait_for(strand(name), 60)

    observations = await asyncio.gather(strand("a"), nested("b", 3))
    reply = await team.act("a", said=str(observations))
    await env.step(reply.text)


def test_simultaneous_turns_are_one_round_and_the_team_counts_once():
    engine, requested = seeded(SIMULTANEOUS)
    trajectory = grow(pair, engine, Branching(width=2))
    assert rows(trajectory) == [
        ("0", 0, "a", "1", 3.5),  # 0.25 + 0.25 + 1 + 2
        ("0", 1, "b", "2", 3.5),
        ("1", 0, "a", "3", 7.5),
        ("1", 1, "b", "4", 7.5),
        ("1.0", 2, "a", "5", 5.0),
        ("1.1", 2, "a", "0", 0.0),
    ]
    assert trajectory.leaf == "1.0"
    assert trajectory.outcome == 12.0
    assert sorted(requested()) == sorted(SIMULTANEOUS)


def test_replies_are_handed_over_in_the_order_of_the_calls():
    class Late:
        def __init__(self):
            self._inner = seeded(SIMULTANEOUS)[0]

        async def generate(self, prompt_ids, sampling):
            await asyncio.sleep(0.03 if bytes(prompt_ids) == b"a" else 0)
            return await self._inner.generate(prompt_ids, sampling)

    assert grow(pair, Late(), Branching(width=2)) == grow(
        pair, seeded(SIMULTANEOUS)[0], Branching(width=2)
    )


def test_the_tree_ends_with_the_branch_that_continues():
    async def orchestra(task, team, env):
        for _ in range(3):
            reply = await team.act("a", said="x")
            if (await env.step(reply.text)).reward >= 5:
                return

    replies = {("a", 0, ""): "2", ("a", 0, "1"): "1", ("a", 1, ""): "3", ("a", 1, "0.1"): "7"}
    trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2))
    assert [turn.node for turn in trajectory.turns] == ["0", "1", "0.0", "0.1"]
    assert (trajectory.leaf, trajectory.outcome) == ("0.1", 9.0)


def test_a_branch_that_has_ended_can_lose():
    async def orchestra(task, team, env):
        for _ in range(2):
            reply = await team.act("a", said="x")
            await env.step(reply.text)
            if reply.text == "1":
                return

    replies = {("a", 0, ""): "1", ("a", 0, "1"): "2", ("a", 1, "1.0"): "3", ("a", 1, "1.1"): "4"}
    trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2))
    assert [turn.node for turn in trajectory.turns] == ["0", "1", "1.0", "1.1"]
    assert (trajectory.leaf, trajectory.outcome) == ("1.1", 6.0)


def test_a_sampled_branch_is_random_and_reproducible():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        await env.step("1")

    async def leaves():
        tree = Branching(width=2, select="sampled")
        [group] = await collect(
            [TASK],
            make_team(Dice()),
            Adder,
            orchestra,
            group_size=12,
            seed=SEED,
            step=STEP,
            tree=tree,
        )
        return [trajectory.leaf for trajectory in group.trajectories]

    drawn = asyncio.run(leaves())
    assert drawn == asyncio.run(leaves())
    assert drawn == [
        str(derive_seed(SEED, STEP, TASK.id, sample, "select", 0) % 2) for sample in range(12)
    ]
    assert set(drawn) == {"0", "1"}


def test_tool_calls_belong_to_their_branch():
    async def orchestra(task, team, env):
        await env.step("look first")
        reply = await team.act("a", said="x")
        await env.step(f"look {reply.text}")
        reply = await team.act("b", said="y")
        await env.step(f"look {reply.text}")
        await env.step(reply.text)

    replies = {("a", 0, ""): "1", ("a", 0, "1"): "2", ("b", 1, ""): "3", ("b", 1, "0.1"): "4"}
    trajectory = grow(orchestra, seeded(replies)[0], Branching(width=2))
    assert [(event.node, event.after_turn, event.query) for event in trajectory.tools] == [
        ("", -1, "look first"),
        ("0", 0, "look 1"),
        ("1", 0, "look 2"),
        ("0.0", 1, "look 3"),
        ("0.1", 1, "look 4"),
    ]


MOVES = st.lists(st.tuples(st.sampled_from("ab*"), st.booleans()), min_size=1, max_size=5)


def dance(moves):
    """Return an orchestra of moves: the agent (`*`: both concurrently), and True if a step follows."""

    async def orchestra(task, team, env):
        text = env.reset(task)
        for agent, has_step in moves:
            names = "ab" if agent == "*" else agent
            replies = await asyncio.gather(*(team.act(name, said=text) for name in names))
            text = ",".join(reply.text for reply in replies)
            if has_step:
                text += (await env.step(replies[-1].text)).observation
        await env.step("0")

    return orchestra


class Dice:
    """Engine that replies a digit drawn by the seed of the call."""

    def __init__(self):
        self.inner = ScriptedEngine(
            lambda _, call: (*str(self.inner.calls[call][1].seed % 10).encode(), 0)
        )

    async def generate(self, prompt_ids, sampling):
        return await self.inner.generate(prompt_ids, sampling)


@settings(max_examples=40, deadline=None)
@given(moves=MOVES)
def test_width_one_plays_the_same_as_no_tree(moves):
    line, tree = (grow(dance(moves), Dice(), branching) for branching in (None, Branching(width=1)))

    def fields(trajectory):
        return [
            (
                t.index,
                t.agent,
                t.seed,
                t.state_key,
                t.prompt_ids,
                t.completion_ids,
                t.scores.get("team"),
            )
            for t in trajectory.turns
        ]

    assert fields(tree) == fields(line)
    assert (tree.outcome, tree.metrics, tree.status) == (line.outcome, line.metrics, line.status)
    assert tree.path == tree.turns
    assert tree.leaf == ".".join("0" * len(moves))


@settings(max_examples=40, deadline=None)
@given(moves=MOVES, width=st.integers(1, 4), select=st.sampled_from(["greedy", "sampled"]))
def test_any_tree_is_complete(moves, width, select):
    engine = Dice()
    trajectory = grow(dance(moves), engine, Branching(width=width, select=select))
    turns = sum(2 if agent == "*" else 1 for agent, _ in moves)
    assert trajectory.status is Status.COMPLETED
    assert (
        len(trajectory.turns) == len(engine.inner.calls) == width * turns
    )  # every call is one turn
    assert len({turn.seed for turn in trajectory.turns}) == width * turns
    assert [turn.index for turn in trajectory.path] == list(range(turns))
    assert len({(turn.node, turn.index) for turn in trajectory.turns}) == width * turns
    # siblings have the state of the path, and the greedy path is the best of them
    for turn in trajectory.path:
        parent = turn.node.rpartition(".")[0]
        siblings = [t for t in trajectory.turns if t.index == turn.index]
        assert {t.node.rpartition(".")[0] for t in siblings} == {parent}
        assert {t.state_key for t in siblings} == {turn.state_key}
        if select == "greedy":
            assert turn.scores["branch"] == max(t.scores["branch"] for t in siblings)
