"""Adaptive branching search by canned replies: its nodes, its grades, its best, and what credit makes of them."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from mcore_mas.credit.assign import columns
from mcore_mas.credit.samples import to_samples
from mcore_mas.equations.advantages import mars2, mcts
from rollout.environments.code import CodeEnv, pack_test
from rollout.orchestras.ab_mcts import Grading, TreeSearch, draw_gaussian
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.turn_scores import local_team, tree_shaping
from rollout.sandbox.judge import StdinTest
from tests.support.canned import Canned
from tests.support.casts import SUM, grow, play, scores, validity
from tests.support.play import SEED, STEP

SOLVER = {"generator": "tree_solver"}
RIGHT, WRONG, NONE = "It is \\boxed{7}.", "It is \\boxed{8}.", "no idea"


def expected_nodes(agents: list[str], grades: list[float]) -> list[tuple[str, str]]:
    """The nodes and who makes them, by the same draws."""
    search, made = TreeSearch(agents, draw_gaussian), []
    for number, grade in enumerate(grades):
        seed = derive_seed(SEED, STEP, "t", 0, "orchestra", "node", number)
        parent, agent = search.select(Random(seed))
        made.append((search.add(parent, agent, grade).name, agent))
    return made


def test_the_tree_is_what_its_seed_draws_and_its_best_node_is_the_answer() -> None:
    replies = [WRONG, WRONG, NONE, RIGHT, WRONG, RIGHT]
    trajectory, prompts = play("ab_mcts", SOLVER, *replies, max_nodes=6)
    grades = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    nodes = expected_nodes(["generator"], grades)
    assert [(turn.node, turn.agent) for turn in trajectory.turns] == nodes
    assert (scores(trajectory), scores(trajectory, "branch")) == (grades, grades)
    assert validity(trajectory) == [True, True, False, True, True, True]
    assert trajectory.leaf == nodes[3][0]  # the first of the two best
    assert (trajectory.outcome, trajectory.answer, trajectory.status) == (
        1.0,
        "7",
        Status.COMPLETED,
    )
    assert [turn.node for turn in trajectory.path][-1] == trajectory.leaf
    texts = dict(zip([name for name, _ in nodes], replies, strict=True))
    for (name, _), prompt in zip(nodes, prompts, strict=True):
        parent = name.rpartition(".")[0]
        assert f"# An earlier attempt\n{texts.get(parent, '')}\n" in prompt
    again, _ = play("ab_mcts", SOLVER, *replies, max_nodes=6)
    assert again.turns == trajectory.turns


def test_it_widens_and_deepens() -> None:
    """With what one seed draws, 8 nodes of equal grade are neither a chain nor a star."""
    trajectory, _ = play("ab_mcts", SOLVER, *[WRONG] * 8)
    depths = [turn.node.count(".") for turn in trajectory.turns]
    assert len(trajectory.turns) == 8 and max(depths) >= 1 and depths.count(0) >= 2
    assert len({turn.node for turn in trajectory.turns}) == 8


def test_several_agents_share_the_tree() -> None:
    roles = {"one": "tree_solver", "two": "tree_solver"}
    grades = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    replies = [RIGHT if grade else WRONG for grade in grades]
    trajectory, _ = play("ab_mcts", roles, *replies, max_nodes=6, agents=["one", "two"])
    assert [(turn.node, turn.agent) for turn in trajectory.turns] == expected_nodes(
        ["one", "two"], grades
    )
    assert {turn.agent for turn in trajectory.turns} == {"one", "two"}


def test_a_good_enough_node_ends_the_search() -> None:
    trajectory, _ = play("ab_mcts", SOLVER, WRONG, RIGHT, grading=Grading(stop_at=1.0))
    assert (len(trajectory.turns), trajectory.outcome) == (2, 1.0)


def test_malformed_replies_alone_leave_no_answer() -> None:
    trajectory, prompts = play(
        "ab_mcts", SOLVER, NONE, NONE, max_nodes=2, grading=Grading(malformed=-0.5)
    )
    assert (trajectory.outcome, trajectory.answer, trajectory.leaf) == (0.0, "", "")
    assert (scores(trajectory), validity(trajectory)) == ([-0.5, -0.5], [False, False])
    if trajectory.turns[1].node == "0.0":
        assert "It could not be read" in prompts[1]


def coding(*replies: str, **options: Any) -> tuple[Trajectory, list[str]]:
    answers = (
        pack_test(StdinTest(stdin="1", expected="2"), visible=True),
        *(pack_test(StdinTest(stdin=given, expected=given), visible=False) for given in ("5", "6")),
    )
    task = Task(id="t", prompt="Add.", answers=answers, env="code", source="s", split="train")
    outputs = {("half", "1"): "2", ("half", "5"): "5", ("half", "6"): "0", ("bad", "1"): "9"}
    make_env = partial(CodeEnv, sandbox=Canned(outputs), reward="rate")
    return play(
        "ab_mcts", {"generator": "tree_coder"}, *replies, task=task, make_env=make_env, **options
    )


def test_programs_may_be_graded_by_visible_tests_alone() -> None:
    bad, half = "```python\nbad\n```", "```python\nhalf\n```"
    trajectory, prompts = coding(
        bad, half, bad, grading=Grading(measure="visible_rate"), max_nodes=3
    )
    assert scores(trajectory) == [0.0, 1.0, 0.0]
    assert (trajectory.outcome, trajectory.metrics["pass_rate"]) == (
        0.5,
        0.5,
    )  # of the hidden tests, seen by nobody
    mended = [
        p for p, turn in zip(prompts, trajectory.turns, strict=True) if turn.node.startswith("0.")
    ]
    assert all(
        "Test 1: wrong answer\nInput: 1\nExpected: 2\nOutput: 9" in prompt for prompt in mended
    )
    graded, _ = coding(half, max_nodes=1, grading=Grading(measure="pass_rate"))
    assert scores(graded) == [0.5]


def test_the_nodes_are_what_the_tree_estimators_compare() -> None:
    replies = [WRONG, RIGHT, WRONG, RIGHT]
    trajectory, _ = play("ab_mcts", SOLVER, *replies, max_nodes=4)
    group = Group(task=SUM, trajectories=(trajectory,))
    for allocated in (tree_shaping(group, gamma=0.0), local_team(group)):
        assert [turn.reward for turn in allocated.trajectories[0].turns] == [0.0, 1.0, 0.0, 1.0]
        turns = columns(to_samples([allocated]))
    by_node = {
        turn.node: grade for turn, grade in zip(trajectory.turns, [0.0, 1.0, 0.0, 1.0], strict=True)
    }
    wanted = []
    for node, grade in by_node.items():
        parent = node.rpartition(".")[0]
        beside = [by_node[n] for n in by_node if n != node and n.rpartition(".")[0] == parent]
        sides = [by_node[parent]] if parent in by_node else []
        sides += [sum(beside) / len(beside)] if beside else []
        wanted.append(grade - (sum(sides) / len(sides) if sides else grade))  # λ = 0.5
    assert mcts(turns).values.tolist() == pytest.approx(wanted)
    shaped = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64) + 0.3 * torch.tensor(
        wanted, dtype=torch.float64
    )
    assert mars2(turns).values.tolist() == pytest.approx(
        ((shaped - shaped.mean()) / (shaped.std() + 1e-6)).tolist()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"grading": Grading(measure="elegance")},
            "does not measure 'elegance'; it measures answered",
        ),
        (
            {"posterior": "beta", "grading": Grading(malformed=-1.0)},
            "a beta posterior takes scores from 0 to 1, and one is -1",
        ),
    ],
)
def test_what_cannot_be_graded_fails_the_trajectory(options: dict[str, Any], message: str) -> None:
    reply = NONE if "posterior" in options else RIGHT
    trajectory, _ = play("ab_mcts", SOLVER, reply, **options)
    assert trajectory.status is Status.FAILED and message in trajectory.error


def test_it_cannot_be_sampled_as_a_tree_of_turns_too() -> None:
    replies = {("generator", 0, ""): WRONG, ("generator", 0, "1"): WRONG}
    trajectory = grow("ab_mcts", SOLVER, replies, max_nodes=1)
    assert "grows its own tree; set no branching" in trajectory.error
