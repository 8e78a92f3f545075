"""Orchestras `game_team` and `single` on scripted replies: prompts, rewards, trees and credit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from retrieval.client import Passage
from rollout.environments import ENVS
from rollout.orchestras.acting import game_team, single
from rollout.orchestras.replies import (
    parse_decided,
    parse_listed,
    parse_search_or_answer,
    parse_solution,
)
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.allocation import majority
from rollout.rewards.turn_scores import local_team
from rollout.teams.roles import ROLES
from rollout.teams.tree import Branching
from tests.support.canned import Canned
from tests.support.casts import scores, speakers, validity
from tests.support.play import SEED, STEP, Adder, collect, seeded
from tests.support.puzzle_team import (
    PATH_TASK,
    make_puzzle_team,
    play_puzzle,
    puzzle_role,
    puzzle_roles,
)

Order = Literal["sequential", "simultaneous"]
ORDERS: tuple[Order, ...] = ("sequential", "simultaneous")
TEAM = puzzle_roles(("tool", "planner"))
PLAYER = puzzle_roles(("player",))

START = PATH_TASK.prompt
HALFWAY = "S 1 2 G 1 3\n. S G"  # after one step to the right
GOAL = "S 1 3 G 1 3\n. . S"

# Rewards of actions from the start, where the distance to the goal is 2. A step costs 0.01 and a
# step into a wall 0.1; shaping adds the distance before minus 0.99 times the distance after; the
# goal is worth 1 and the shortest path 0.5.
ONE_STEP = -0.01 + 2 - 0.99
TWO_STEPS = -0.02 + 2 - 0.99 + 1 + 1.5
INTO_WALL = -0.1 + 2 - 0.99 * 2


def play_team(*replies: str, max_turns: int = 5, **options: Any) -> tuple[Trajectory, list[str]]:
    """Play `game_team` on PATH_TASK; return trajectory and prompts."""
    orchestra = partial(game_team, max_turns=max_turns, **options)
    return play_puzzle(orchestra, TEAM, *replies, max_turns=max_turns)


def turn_rewards(group: Group) -> list[list[float | None]]:
    """Return the reward of every turn of every trajectory."""
    return [[turn.reward for turn in trajectory.turns] for trajectory in group.trajectories]


def test_the_planner_acts_and_the_tool_agent_is_scored_by_its_own_proposal() -> None:
    trajectory, prompts = play_team(
        "so **Actions List**\n**Actions List**: L", "L is a wall\n#### R R"
    )
    assert speakers(trajectory) == ["tool", "planner"]
    assert prompts == [f"propose {START}|", f"decide {START}||L"]
    assert scores(trajectory) == pytest.approx([INTO_WALL, TWO_STEPS])
    assert scores(trajectory, "team") == pytest.approx([TWO_STEPS, TWO_STEPS])
    group = local_team(Group(task=PATH_TASK, trajectories=(trajectory,)))
    assert turn_rewards(group) == [pytest.approx([INTO_WALL + TWO_STEPS, 2 * TWO_STEPS])]
    assert trajectory.outcome == pytest.approx(TWO_STEPS)
    assert trajectory.success == 1.0
    assert trajectory.metrics["impossible_actions"] == 0.0  # the proposal was not carried out


# In the first turn the tool agent proposes two steps, and the planner takes one of them.
TWO_TURNS = ("**Actions List**: R R", "#### R", "**Actions List**: R", "#### R")


def test_the_second_turn_continues_from_the_first() -> None:
    trajectory, prompts = play_team(*TWO_TURNS)
    assert prompts[2] == f"propose {HALFWAY}|R\n{HALFWAY}\n"
    assert prompts[3] == f"decide {HALFWAY}|R\n{HALFWAY}\n|R"
    second_step = TWO_STEPS - ONE_STEP
    assert scores(trajectory) == pytest.approx([TWO_STEPS, ONE_STEP, second_step, second_step])
    assert trajectory.outcome == pytest.approx(TWO_STEPS)


def test_in_simultaneous_order_the_planner_reads_the_proposal_of_the_turn_before() -> None:
    _, prompts = play_team(*TWO_TURNS, order="simultaneous")
    assert prompts[1] == f"decide {START}||"
    assert prompts[3] == f"decide {HALFWAY}|R\n{HALFWAY}\n|R R"


BAD_PROPOSAL = "**Actions List**: U"
GOOD_PROPOSAL = "**Actions List**: R R"
BAD_PLAN = "#### L"
GOOD_PLAN = "#### R R"

# replies of a tree of width 2 by agent, turn and node
TREE_REPLIES: Mapping[Order, Mapping[tuple[str, int, str], str]] = {
    "sequential": {
        ("tool", 0, ""): BAD_PROPOSAL,
        ("tool", 0, "1"): GOOD_PROPOSAL,
        ("planner", 1, "1.0"): BAD_PLAN,
        ("planner", 1, "1.1"): GOOD_PLAN,
    },
    "simultaneous": {
        ("tool", 0, ""): GOOD_PROPOSAL,
        ("planner", 1, ""): BAD_PLAN,
        ("tool", 0, "1"): BAD_PROPOSAL,
        ("planner", 1, "1"): GOOD_PLAN,
    },
}


def grow_tree(order: Order) -> Group:
    """Play a tree of width 2, whose second branch is the better one at every node."""
    engine, _ = seeded(TREE_REPLIES[order])
    [group] = asyncio.run(
        collect(
            [PATH_TASK],
            make_puzzle_team(engine, TEAM),
            ENVS["plan_path"],
            partial(game_team, order=order),
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=Branching(width=2),
        )
    )
    return group  # type: ignore[no-any-return]


def branch_scores(trajectory: Trajectory) -> dict[tuple[str, str], float]:
    """Return the score `branch` of every turn by agent and node."""
    return {(turn.agent, turn.node): turn.scores["branch"] for turn in trajectory.turns}


@pytest.mark.parametrize("order", ORDERS)
def test_a_tree_continues_from_the_better_branch(order: Order) -> None:
    [trajectory] = grow_tree(order).trajectories
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, "")
    assert trajectory.success == 1.0
    assert trajectory.path[-1].text == GOOD_PLAN


def test_in_sequential_order_each_agent_has_branches_of_its_own() -> None:
    [trajectory] = grow_tree("sequential").trajectories
    assert [turn.text for turn in trajectory.path] == [GOOD_PROPOSAL, GOOD_PLAN]
    assert trajectory.leaf == "1.1"
    branches = branch_scores(trajectory)
    assert branches["tool", "0"] == pytest.approx(INTO_WALL)
    assert branches["tool", "1"] == pytest.approx(TWO_STEPS)


def test_in_simultaneous_order_a_branch_has_the_scores_of_both_agents_and_the_team() -> None:
    [trajectory] = grow_tree("simultaneous").trajectories
    assert [turn.text for turn in trajectory.path] == [BAD_PROPOSAL, GOOD_PLAN]
    assert trajectory.leaf == "1"
    branches = branch_scores(trajectory)
    assert branches["tool", "0"] == pytest.approx(TWO_STEPS + 2 * INTO_WALL)
    assert branches["planner", "1"] == pytest.approx(INTO_WALL + 2 * TWO_STEPS)


@pytest.mark.parametrize(
    ("order", "tool_rewards", "tool_advantages"),
    [
        # The environment has not stepped after the proposal, so there is no team reward.
        ("sequential", [INTO_WALL, TWO_STEPS], [-(0.5**0.5), 0.5**0.5]),
        # The sums of local and team reward are equal.
        ("simultaneous", [TWO_STEPS + INTO_WALL, INTO_WALL + TWO_STEPS], [0.0, 0.0]),
    ],
)
def test_a_branch_of_the_tool_agent_is_rewarded_for_its_own_round(
    order: Order, tool_rewards: list[float], tool_advantages: list[float]
) -> None:
    group = local_team(grow_tree(order))
    rewards = {(turn.agent, turn.node): turn.reward for turn in group.trajectories[0].turns}
    assert [rewards["tool", "0"], rewards["tool", "1"]] == pytest.approx(tool_rewards)

    estimators = dict.fromkeys(("tool", "planner"), AdvantageConfig(name="at_grpo"))
    # A reward that all branches share does not change the advantages.
    for shared_reward in (0.0, 7.0):
        samples = [
            replace(sample, reward=sample.reward + shared_reward) for sample in to_samples([group])
        ]
        advantages = [
            sample.advantages[0]  # type: ignore[index]
            for sample in add_advantages(samples, estimators)
            if sample.agent == "tool"
        ]
        assert advantages == pytest.approx(tool_advantages, abs=1e-5)


def test_malformed_replies_are_counted_and_use_up_turns() -> None:
    trajectory, prompts = play_team("R R", "R R", "**Actions List**: up", "####", max_turns=2)
    assert validity(trajectory) == [False, False, True, False]
    assert prompts[1] == f"decide {START}||"
    assert prompts[2].endswith(f"|(no actions)\n{START}\nNo list of actions was given.\n")
    assert scores(trajectory) == [-1.0, -1.0, -2.0, -2.0]  # the last turn also loses the game
    assert trajectory.outcome == -3.0
    assert trajectory.metrics["malformed_actions"] == 2.0
    assert trajectory.success == 0.0
    assert trajectory.status is Status.COMPLETED


def test_an_environment_that_cannot_preview_fails_the_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENVS, "adder", Adder)
    task = Task(id="s", prompt="1+1", answers=("2",), env="adder", source="s", split="train")
    trajectory, _ = play_puzzle(game_team, TEAM, "**Actions List**: 2", "#### 2", task=task)
    assert trajectory.status is Status.FAILED
    assert "environment 'adder' cannot preview an action" in trajectory.error


def test_a_single_agent_plays_until_the_goal() -> None:
    trajectory, prompts = play_puzzle(single, PLAYER, "#### R", "no", "#### R")
    assert prompts[0] == f"play {START}|"
    assert prompts[1] == f"play {HALFWAY}|R\n{HALFWAY}\n"
    assert scores(trajectory, "team") == pytest.approx([ONE_STEP, -1.0, TWO_STEPS - ONE_STEP])
    assert trajectory.success == 1.0
    assert trajectory.metrics["malformed_actions"] == 1.0


def test_a_single_agent_ends_after_max_turns() -> None:
    trajectory, _ = play_puzzle(partial(single, max_turns=1), PLAYER, "#### R")
    assert len(trajectory.turns) == 1
    assert trajectory.success == 0.0


@pytest.mark.parametrize(("reply", "success"), [("so \\boxed{7}", 1.0), ("so 7", 0.0)])
def test_a_single_agent_solves_a_math_task(reply: str, success: float) -> None:
    task = Task(id="s", prompt="3+4", answers=("7",), env="math", source="s", split="train")
    trajectory, _ = play_puzzle(single, {"player": ROLES["lone_solver"]}, reply, task=task)
    assert trajectory.success == success


class Book:
    """Retriever that knows one passage."""

    async def search(self, query: str, k: int) -> list[Passage]:
        return [Passage.compose("0", query, "Ada is a miller.")]


def test_a_single_agent_searches_and_answers() -> None:
    task = Task(
        id="q", prompt="Ada's trade?", answers=("miller",), env="search", source="q", split="train"
    )
    trajectory, prompts = play_puzzle(
        single,
        {"player": ROLES["lone_searcher"]},
        "<search>Ada</search>",
        "<answer>miller</answer>",
        task=task,
        retriever=Book(),
        style="text",
    )
    assert trajectory.success == 1.0
    assert len(trajectory.turns) == 2
    assert "<search> Ada </search>\n<information> Ada is a miller. </information>\n" in prompts[1]


def test_success_is_the_outcome_without_the_metric_solved() -> None:
    trajectory, _ = play_puzzle(single, PLAYER, "#### R R")
    assert trajectory.outcome == pytest.approx(TWO_STEPS)
    assert replace(trajectory, metrics={}).success == trajectory.outcome
    assert replace(trajectory, metrics={}, outcome=None).success == 0.0


@pytest.mark.parametrize(
    ("text", "listed", "decided"),
    [
        ("think\n**Actions List**: R, R", "R, R", None),
        ("**Actions List**: R\n**Actions List**: [\"U\"]\nbye", '["U"]', None),
        ("**Actions List**:", None, None),
        ("the **Actions List**: R", None, None),
        ("#### R\n#### U D ", None, "U D"),
        ("####", None, None),
        ("#### R\nor so", None, None),
        ("R", None, None),
    ],
)  # fmt: skip
def test_parse_listed_and_decided(text: str, listed: str | None, decided: str | None) -> None:
    assert parse_listed(text) == listed
    assert parse_decided(text) == decided


@pytest.mark.parametrize(
    ("text", "value"),
    [("so \\boxed{7}", "so \\boxed{7}"), ("so 7", None), ("\\boxed{}", None)],
)
def test_parse_solution(text: str, value: str | None) -> None:
    assert parse_solution(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<search> a </search>", "<search> a </search>"),
        ("<search>a</search> <answer>b</answer>", "<answer> b </answer>"),
        ("<answer></answer>", None),
    ],
)
def test_parse_search_or_answer(text: str, value: str | None) -> None:
    assert parse_search_or_answer(text) == value


def play_programs(
    *replies: str, outputs: Mapping[str | tuple[str, str], str]
) -> tuple[Trajectory, list[str]]:
    """Play `game_team` with a tool agent that writes programs, of which the outputs are given."""
    roles = {**TEAM, "tool": puzzle_role("tool", "game_coder")}
    orchestra = partial(game_team, actions_from="program")
    return play_puzzle(orchestra, roles, *replies, sandbox=Canned(outputs))


def test_the_output_of_a_program_is_the_proposal() -> None:
    reply = "<think>I search.</think>```python\nsearch()\n```"
    trajectory, prompts = play_programs(
        reply, "#### R R", outputs={"search()": "2 steps\n**Actions List**: R R\n"}
    )
    assert prompts[1] == f"decide {START}||R R"
    assert scores(trajectory) == pytest.approx([TWO_STEPS, TWO_STEPS])
    tool_calls = [(event.after_turn, event.query.strip()) for event in trajectory.tools]
    assert tool_calls == [(0, "search()")]


@pytest.mark.parametrize(
    "reply", ["no idea", "```python\nfails()\n```", "```python\nsilent()\n```"]
)
def test_without_a_list_in_the_output_the_proposal_is_empty(reply: str) -> None:
    trajectory, prompts = play_programs(reply, "#### R R", outputs={"silent()": "R R"})
    assert prompts[1] == f"decide {START}||"
    assert scores(trajectory) == pytest.approx([-1.0, TWO_STEPS])  # as a malformed list
    assert validity(trajectory) == [reply != "no idea", True]


def test_a_single_agent_may_act_by_programs() -> None:
    step = "```python\nstep()\n```"
    silent = "```python\nsilent()\n```"
    trajectory, prompts = play_puzzle(
        partial(single, actions_from="program"),
        {"player": puzzle_role("player", "game_coder")},
        step,
        silent,
        step,
        sandbox=Canned({"step()": "**Actions List**: R", "silent()": "R"}),
    )
    assert prompts[1] == f"play {HALFWAY}|R\n{HALFWAY}\n"
    assert "(no actions)" in prompts[2]
    assert scores(trajectory, "team") == pytest.approx([ONE_STEP, -1.0, TWO_STEPS - ONE_STEP])
    assert [event.after_turn for event in trajectory.tools] == [0, 1, 2]


def test_teams_that_reach_the_same_state_vote_for_the_same_answer() -> None:
    halfway = play_team("**Actions List**: R", "#### R", max_turns=1)[0]
    goal = play_team("**Actions List**: R", "#### R R", max_turns=1)[0]
    malformed = play_team("x", "no", max_turns=1)[0]
    trajectories = (halfway, goal, goal, malformed)
    assert [trajectory.answer for trajectory in trajectories] == [HALFWAY, GOAL, GOAL, ""]
    group = majority(Group(task=PATH_TASK, trajectories=trajectories))
    assert turn_rewards(group) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_trajectories_without_a_tree_are_compared_in_the_states_that_they_share() -> None:
    """at_grpo compares the first turns of each agent, which share a state though prompts differ."""
    right = ("**Actions List**: R", "#### R")
    left = ("**Actions List**: L", "#### L")
    first, _ = play_team(*right, *right, max_turns=2)
    second, _ = play_team(*left, *right, max_turns=2)
    first = replace(first, id="first", sample=0)
    second = replace(second, id="second", sample=1)
    # Only the first prompts of the tool agent are the same.
    assert len({turn.state_key for turn in (*first.turns, *second.turns)}) == 7
    first_anchors = [turn.anchor for turn in first.turns]
    second_anchors = [turn.anchor for turn in second.turns]
    assert first_anchors[:2] == second_anchors[:2]
    assert first_anchors[2:] != second_anchors[2:]

    group = local_team(Group(task=PATH_TASK, trajectories=(first, second)))
    estimators = dict.fromkeys(("tool", "planner"), AdvantageConfig(name="at_grpo"))
    credited = add_advantages(to_samples([group]), estimators)
    advantages: dict[str, list[float]] = {"first": [], "second": []}
    for sample in credited:
        advantages[sample.trajectory].append(sample.advantages[0])  # type: ignore[index]
    half = 0.5**0.5  # two votes: (r - μ) / σ = ±1/√2
    assert advantages["first"] == pytest.approx([half, half, 0, 0], abs=1e-5)
    assert advantages["second"] == pytest.approx([-half, -half, 0, 0], abs=1e-5)
