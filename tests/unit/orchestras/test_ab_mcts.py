"""Orchestra `ab_mcts` on scripted replies: nodes, grades, the best attempt, and credit."""

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
from rollout.orchestras.ab_mcts import Grading
from rollout.orchestras.thompson_search import TreeSearch, draw_gaussian
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.turn_scores import local_team, tree_shaping
from rollout.sandbox.judge import StdinTest
from tests.support.canned import Canned
from tests.support.casts import SUM, grow, play, scores, validity
from tests.support.play import SEED, STEP

SOLVER = {"generator": "tree_solver"}
RIGHT = "It is \\boxed{7}."
WRONG = "It is \\boxed{8}."
MALFORMED = "no idea"


def parent_name(node: str) -> str:
    """Return the name of a node's parent; "" for a child of the root."""
    return node.rpartition(".")[0]


def expected_nodes(agents: list[str], grades: list[float]) -> list[tuple[str, str]]:
    """Return name and agent of every node that a search with the trajectory's seeds adds."""
    search = TreeSearch(agents, draw_gaussian)
    nodes = []
    for number, grade in enumerate(grades):
        seed = derive_seed(SEED, STEP, "t", 0, "orchestra", "node", number)
        parent, agent = search.select(Random(seed))
        node = search.add(parent, agent, grade)
        nodes.append((node.name, agent))
    return nodes


def test_the_seed_decides_the_tree_and_the_first_best_node_is_the_answer() -> None:
    replies = [WRONG, WRONG, MALFORMED, RIGHT, WRONG, RIGHT]
    grades = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    nodes = expected_nodes(["generator"], grades)

    trajectory, prompts = play("ab_mcts", SOLVER, *replies, max_nodes=6)
    assert [(turn.node, turn.agent) for turn in trajectory.turns] == nodes
    assert scores(trajectory) == scores(trajectory, "branch") == grades
    assert validity(trajectory) == [True, True, False, True, True, True]
    assert trajectory.status is Status.COMPLETED
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")
    assert trajectory.leaf == nodes[3][0]
    assert trajectory.path[-1].node == trajectory.leaf

    names = [name for name, _ in nodes]
    texts = dict(zip(names, replies, strict=True))
    for name, prompt in zip(names, prompts, strict=True):
        earlier = texts.get(parent_name(name), "")
        assert f"# An earlier attempt\n{earlier}\n" in prompt

    again, _ = play("ab_mcts", SOLVER, *replies, max_nodes=6)
    assert again.turns == trajectory.turns


def test_equal_grades_make_a_tree_that_is_wide_and_deep() -> None:
    trajectory, _ = play("ab_mcts", SOLVER, *[WRONG] * 8)
    nodes = [turn.node for turn in trajectory.turns]
    depths = [node.count(".") for node in nodes]
    assert len(set(nodes)) == 8
    assert max(depths) >= 1
    assert depths.count(0) >= 2


def test_several_agents_grow_one_tree() -> None:
    roles = {"one": "tree_solver", "two": "tree_solver"}
    grades = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    replies = [RIGHT if grade else WRONG for grade in grades]
    trajectory, _ = play("ab_mcts", roles, *replies, max_nodes=6, agents=["one", "two"])
    nodes = [(turn.node, turn.agent) for turn in trajectory.turns]
    assert nodes == expected_nodes(["one", "two"], grades)
    assert {agent for _, agent in nodes} == {"one", "two"}


def test_a_grade_of_stop_at_ends_the_search() -> None:
    trajectory, _ = play("ab_mcts", SOLVER, WRONG, RIGHT, grading=Grading(stop_at=1.0))
    assert len(trajectory.turns) == 2
    assert trajectory.outcome == 1.0


def test_malformed_replies_alone_leave_no_answer() -> None:
    trajectory, prompts = play(
        "ab_mcts", SOLVER, MALFORMED, MALFORMED, max_nodes=2, grading=Grading(malformed=-0.5)
    )
    assert (trajectory.outcome, trajectory.answer, trajectory.leaf) == (0.0, "", "")
    assert scores(trajectory) == [-0.5, -0.5]
    assert validity(trajectory) == [False, False]
    improves_on_first = trajectory.turns[1].node == "0.0"
    assert ("It could not be read" in prompts[1]) == improves_on_first


HALF = "```python\nhalf\n```"  # passes the visible test and one of two hidden tests
BAD = "```python\nbad\n```"  # passes no test


def play_code(*replies: str, **options: Any) -> tuple[Trajectory, list[str]]:
    """Play one code task with a visible and two hidden tests; return trajectory and prompts."""
    tests = [pack_test(StdinTest(stdin="1", expected="2"), visible=True)]
    tests += [
        pack_test(StdinTest(stdin=number, expected=number), visible=False) for number in ("5", "6")
    ]
    task = Task(id="t", prompt="Add.", answers=tuple(tests), env="code", source="s", split="train")
    outputs = {("half", "1"): "2", ("half", "5"): "5", ("half", "6"): "0", ("bad", "1"): "9"}
    make_env = partial(CodeEnv, sandbox=Canned(outputs), reward="rate")
    roles = {"generator": "tree_coder"}
    return play("ab_mcts", roles, *replies, task=task, make_env=make_env, **options)


def test_the_visible_rate_grades_programs_without_the_hidden_tests() -> None:
    trajectory, prompts = play_code(
        BAD, HALF, BAD, grading=Grading(measure="visible_rate"), max_nodes=3
    )
    assert scores(trajectory) == [0.0, 1.0, 0.0]
    assert trajectory.outcome == 0.5  # on the hidden tests
    assert trajectory.metrics["pass_rate"] == 0.5
    for prompt, turn in zip(prompts, trajectory.turns, strict=True):
        if parent_name(turn.node) == "0":
            assert "Test 1: wrong answer\nInput: 1\nExpected: 2\nOutput: 9" in prompt


def test_a_metric_of_the_environment_may_be_the_grade() -> None:
    trajectory, _ = play_code(HALF, max_nodes=1, grading=Grading(measure="pass_rate"))
    assert scores(trajectory) == [0.5]


def test_tree_estimators_compare_the_nodes() -> None:
    grades = [0.0, 1.0, 0.0, 1.0]
    trajectory, _ = play("ab_mcts", SOLVER, WRONG, RIGHT, WRONG, RIGHT, max_nodes=4)
    group = Group(task=SUM, trajectories=(trajectory,))
    for allocated in (tree_shaping(group, gamma=0.0), local_team(group)):
        assert [turn.reward for turn in allocated.trajectories[0].turns] == grades
        turns = columns(to_samples([allocated]))

    grade_of = dict(zip([turn.node for turn in trajectory.turns], grades, strict=True))
    advantages = []
    for node, grade in grade_of.items():
        parent = parent_name(node)
        siblings = [
            grade_of[other] for other in grade_of if other != node and parent_name(other) == parent
        ]
        baselines = []
        if parent in grade_of:
            baselines.append(grade_of[parent])
        if siblings:
            baselines.append(sum(siblings) / len(siblings))
        baseline = sum(baselines) / len(baselines) if baselines else grade  # λ = 0.5
        advantages.append(grade - baseline)
    assert mcts(turns).values.tolist() == pytest.approx(advantages)

    shaped = torch.tensor(grades, dtype=torch.float64)
    shaped += 0.3 * torch.tensor(advantages, dtype=torch.float64)
    normalized = (shaped - shaped.mean()) / (shaped.std() + 1e-6)
    assert mars2(turns).values.tolist() == pytest.approx(normalized.tolist())


@pytest.mark.parametrize(
    ("reply", "options", "message"),
    [
        (
            RIGHT,
            {"grading": Grading(measure="elegance")},
            "does not measure 'elegance'; it measures answered",
        ),
        (
            MALFORMED,
            {"posterior": "beta", "grading": Grading(malformed=-1.0)},
            "an attempt was graded -1, and posterior 'beta' needs grades from 0 to 1; "
            "use posterior 'gaussian'",
        ),
    ],
)
def test_a_trajectory_fails_without_a_valid_grade(
    reply: str, options: dict[str, Any], message: str
) -> None:
    trajectory, _ = play("ab_mcts", SOLVER, reply, **options)
    assert trajectory.status is Status.FAILED
    assert message in trajectory.error


def test_a_tree_of_turns_cannot_contain_a_searched_tree() -> None:
    replies = {("generator", 0, ""): WRONG, ("generator", 0, "1"): WRONG}
    trajectory = grow("ab_mcts", SOLVER, replies, max_nodes=1)
    assert "grows its own tree; leave out trainer.branching" in trajectory.error
