"""The game team and the lone agent, played by canned replies through the real environment and collector."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from retrieval.client import Passage
from rollout.engines import EngineClient
from rollout.environments import ENVS
from rollout.environments.games import PUZZLES
from rollout.orchestras.acting import game_team, single
from rollout.orchestras.replies import (
    parse_decided,
    parse_listed,
    parse_search_or_answer,
    parse_solution,
)
from rollout.records.trajectory import Group, Sampling, Status, Task, Trajectory
from rollout.rewards.allocation import majority
from rollout.rewards.turn_scores import local_team
from rollout.tasks.generators import GENERATORS
from rollout.tasks.puzzles import puzzle_demonstrations
from rollout.tasks.splits import split_of
from rollout.teams.episode import Orchestra
from rollout.teams.roles import ROLES, Agent, Role
from rollout.teams.team import Team
from rollout.teams.tree import Branching
from tests.support.canned import Canned
from tests.support.play import SEED, STEP, Adder, Bytes, collect, seeded
from tests.support.scripted_engine import ScriptedEngine

TASK = Task(
    id="t",
    prompt="S 1 1 G 1 3\nS . G",
    answers=("R R",),
    env="plan_path",
    source="plan_path_1x3",
    split="train",
)
HALFWAY = "S 1 2 G 1 3\n. S G"
SHORT = {
    "tool": "propose {state}|{history}",
    "planner": "decide {state}|{history}|{proposal}",
    "player": "play {state}|{history}",
}
# distances 2 1 0; a step is -0.01, goal and shortest way 1.5
ONE, BOTH, WALL = -0.01 + 2 - 0.99, -0.02 + 2 - 0.99 + 1 + 1.5, -0.1 + 2 - 0.99 * 2


def roles(*names: str) -> dict[str, Role]:
    known = {"tool": "game_tool", "planner": "game_planner", "player": "player"}
    return {name: replace(ROLES[known[name]], system="", user=SHORT[name]) for name in names}


def make_team(engine: ScriptedEngine, *names: str) -> Team:
    agents = {
        name: Agent(name=name, role=role, policy="p", sampling=Sampling(max_tokens=99))
        for name, role in roles(*names).items()
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]


def play(
    orchestra: Orchestra, names: tuple[str, ...], *replies: str, task: Task = TASK, **env: Any
) -> Any:
    """The trajectory in which the agents say `replies`, and the prompts they saw."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    team = make_team(engine, *names)
    make_env = partial(ENVS[task.env], **env)
    [group] = asyncio.run(collect([task], team, make_env, orchestra, group_size=1, seed=0, step=0))
    return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]


def play_team(*replies: str, max_turns: int = 5, **options: Any) -> tuple[Trajectory, list[str]]:
    return play(  # type: ignore[no-any-return]
        partial(game_team, max_turns=max_turns, **options),
        ("tool", "planner"),
        *replies,
        max_turns=max_turns,
    )


def local(trajectory: Trajectory) -> list[float]:
    return [turn.scores["local"] for turn in trajectory.turns]


def test_the_planner_acts_and_the_tool_agent_is_scored_by_its_own_proposal() -> None:
    trajectory, prompts = play_team(
        "so **Actions List**\n**Actions List**: L", "L is a wall\n#### R R"
    )
    assert [turn.agent for turn in trajectory.turns] == ["tool", "planner"]
    assert prompts == [f"propose {TASK.prompt}|", f"decide {TASK.prompt}||L"]
    assert local(trajectory) == [pytest.approx(WALL), pytest.approx(BOTH)]
    assert [turn.scores["team"] for turn in trajectory.turns] == [pytest.approx(BOTH)] * 2
    allocated = local_team(Group(task=TASK, trajectories=(trajectory,)))
    assert [turn.reward for turn in allocated.trajectories[0].turns] == [
        pytest.approx(WALL + BOTH),
        pytest.approx(2 * BOTH),
    ]
    assert trajectory.outcome == pytest.approx(BOTH)
    assert trajectory.success == 1.0
    assert trajectory.metrics["impossible_actions"] == 0.0  # the proposal was not carried out


def test_the_second_turn_goes_on_from_the_first() -> None:
    trajectory, prompts = play_team(
        "**Actions List**: R R", "#### R", "**Actions List**: R", "#### R"
    )
    assert prompts[2] == f"propose {HALFWAY}|R\n{HALFWAY}\n"
    assert prompts[3] == f"decide {HALFWAY}|R\n{HALFWAY}\n|R"
    assert local(trajectory) == pytest.approx([BOTH, ONE, BOTH - ONE, BOTH - ONE])
    assert trajectory.outcome == pytest.approx(BOTH)


def test_in_simultaneous_order_the_planner_sees_the_proposal_before() -> None:
    replies = ("**Actions List**: R R", "#### R", "**Actions List**: R", "#### R")
    _, prompts = play_team(*replies, order="simultaneous")
    assert prompts[1] == f"decide {TASK.prompt}||"
    assert prompts[3] == f"decide {HALFWAY}|R\n{HALFWAY}\n|R R"


ORDERS = pytest.mark.parametrize("order", ["sequential", "simultaneous"])


def tree(order: str) -> Group:
    """Of the tool agent's two proposals the second is the better one, and so are the planner's second actions."""
    up, on = "**Actions List**: U", "**Actions List**: R R"
    replies = {
        "sequential": {
            ("tool", 0, ""): up, ("tool", 0, "1"): on,
            ("planner", 1, "1.0"): "#### L", ("planner", 1, "1.1"): "#### R R",
        },
        "simultaneous": {
            ("tool", 0, ""): on, ("planner", 1, ""): "#### L",
            ("tool", 0, "1"): up, ("planner", 1, "1"): "#### R R",
        },
    }[order]  # fmt: skip
    engine, _ = seeded(replies)
    [group] = asyncio.run(
        collect(
            [TASK],
            make_team(engine, "tool", "planner"),
            ENVS["plan_path"],
            partial(game_team, order=order),  # type: ignore[arg-type]
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=Branching(width=2),
        )
    )
    return group  # type: ignore[no-any-return]


@ORDERS
def test_a_tree_goes_on_from_the_better_branch(order: str) -> None:
    [trajectory] = tree(order).trajectories
    up, on = "**Actions List**: U", "**Actions List**: R R"
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, "")
    assert trajectory.success == 1.0
    assert [turn.text for turn in trajectory.path] == (
        [on, "#### R R"] if order == "sequential" else [up, "#### R R"]
    )
    branches = {(turn.agent, turn.node): turn.scores["branch"] for turn in trajectory.turns}
    if order == "sequential":
        assert trajectory.leaf == "1.1"
        assert branches[("tool", "0")] == pytest.approx(WALL)
        assert branches[("tool", "1")] == pytest.approx(BOTH)
    else:  # both agents' own scores and, once, the team's
        assert trajectory.leaf == "1"
        assert branches[("tool", "0")] == pytest.approx(BOTH + 2 * WALL)
        assert branches[("planner", "1")] == pytest.approx(WALL + 2 * BOTH)


@ORDERS
def test_d10_a_tool_agents_branch_is_paid_by_its_own_round(order: str) -> None:
    """In sequence nothing has stepped then, and whatever the state brings is the same for all of its branches."""
    group = local_team(tree(order))
    rewards = {(turn.agent, turn.node): turn.reward for turn in group.trajectories[0].turns}
    own, team = (
        ((WALL, BOTH), (0.0, 0.0)) if order == "sequential" else ((BOTH, WALL), (WALL, BOTH))
    )
    assert [rewards["tool", "0"], rewards["tool", "1"]] == pytest.approx(
        [own[0] + team[0], own[1] + team[1]]
    )
    rules = dict.fromkeys(("tool", "planner"), AdvantageConfig(name="at_grpo"))
    for more in (0.0, 7.0):
        samples = [replace(sample, reward=sample.reward + more) for sample in to_samples([group])]
        found = [s.advantages[0] for s in add_advantages(samples, rules) if s.agent == "tool"]  # type: ignore[index]
        half = (
            0.5**0.5 if order == "sequential" else 0.0
        )  # simultaneous: both branches' sums are equal here
        assert found == pytest.approx([-half, half], abs=1e-5)


def test_malformed_replies_are_counted_and_cost_a_turn() -> None:
    trajectory, prompts = play_team("R R", "R R", "**Actions List**: up", "####", max_turns=2)
    assert [turn.valid for turn in trajectory.turns] == [False, False, True, False]
    assert prompts[1] == f"decide {TASK.prompt}||"
    assert prompts[2].endswith(
        "|(no actions)\n" + TASK.prompt + "\nNo list of actions was given.\n"
    )
    assert local(trajectory) == [-1.0, -1.0, -2.0, -2.0]  # the last turn adds the game's failure
    assert trajectory.outcome == -3.0
    assert trajectory.metrics["malformed_actions"] == 2.0
    assert trajectory.success == 0.0
    assert trajectory.status is Status.COMPLETED


def test_an_environment_that_cannot_preview_fails_the_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENVS, "adder", Adder)
    sums = Task(id="s", prompt="1+1", answers=("2",), env="adder", source="s", split="train")
    trajectory, _ = play(game_team, ("tool", "planner"), "**Actions List**: 2", "#### 2", task=sums)
    assert trajectory.status is Status.FAILED
    assert "Adder cannot preview an action" in trajectory.error


def test_one_agent_alone() -> None:
    trajectory, prompts = play(single, ("player",), "#### R", "no", "#### R")
    assert prompts[0] == f"play {TASK.prompt}|"
    assert prompts[1] == f"play {HALFWAY}|R\n{HALFWAY}\n"
    assert [turn.scores["team"] for turn in trajectory.turns] == pytest.approx(
        [ONE, -1.0, BOTH - ONE]
    )
    assert (trajectory.success, trajectory.metrics["malformed_actions"]) == (1.0, 1.0)
    given_up, _ = play(partial(single, max_turns=1), ("player",), "#### R")
    assert (len(given_up.turns), given_up.success) == (1, 0.0)


def test_one_agent_alone_on_other_tasks() -> None:
    def alone(role: str, task: Task, *replies: str, **tools: Any) -> tuple[Trajectory, list[str]]:
        engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
        agent = Agent(name="player", role=ROLES[role], policy="p", sampling=Sampling(max_tokens=99))
        team = Team({"player": agent}, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]
        make_env = partial(ENVS[task.env], **tools)
        [group] = asyncio.run(collect([task], team, make_env, single, group_size=1, seed=0, step=0))
        return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]

    sums = Task(id="s", prompt="3+4", answers=("7",), env="math", source="s", split="train")
    assert alone("lone_solver", sums, "so \\boxed{7}")[0].success == 1.0
    assert alone("lone_solver", sums, "so 7")[0].success == 0.0

    class Book:
        async def search(self, query: str, k: int) -> list[Passage]:
            return [Passage.compose("0", query, "Ada is a miller.")]

    trade = Task(
        id="q", prompt="Ada's trade?", answers=("miller",), env="search", source="q", split="train"
    )
    replies = ("<search>Ada</search>", "<answer>miller</answer>")
    trajectory, prompts = alone("lone_searcher", trade, *replies, retriever=Book(), style="text")
    assert (trajectory.success, len(trajectory.turns)) == (1.0, 2)
    assert "<search> Ada </search>\n<information> Ada is a miller. </information>\n" in prompts[1]


def test_success_is_the_outcome_where_nothing_says_solved() -> None:
    trajectory, _ = play(single, ("player",), "#### R R")
    assert trajectory.outcome == pytest.approx(BOTH)
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
def test_parsers(text: str, listed: str | None, decided: str | None) -> None:
    assert parse_listed(text) == listed
    assert parse_decided(text) == decided


def test_parsers_of_the_other_lone_agents() -> None:
    assert parse_solution("so \\boxed{7}") == "so \\boxed{7}"
    assert parse_solution("so 7") is parse_solution("\\boxed{}") is None
    assert parse_search_or_answer("<search> a </search>") == "<search> a </search>"
    assert parse_search_or_answer("<search>a</search> <answer>b</answer>") == "<answer> b </answer>"
    assert parse_search_or_answer("<answer></answer>") is None


@pytest.mark.parametrize(
    ("game", "options"), [("plan_path", {"size": 5}), ("sudoku", {}), ("sokoban", {})]
)
@pytest.mark.parametrize("names", [("tool", "planner"), ("player",)])
def test_demonstrations_are_legal_and_of_training_puzzles(
    game: str, options: dict[str, int], names: tuple[str, ...]
) -> None:
    own = roles(*names)
    shown = list(GENERATORS[game].demonstrations(1, 60, roles=own, **options))
    assert shown == list(puzzle_demonstrations(PUZZLES[game], 1, 60, roles=own, **options))
    assert len(shown) == 60
    assert {d.agent for d in shown} == set(names)
    assert all(own[d.agent].parse(d.messages[-1].content) is not None for d in shown)
    if game == "plan_path":
        maps = [
            d.messages[0].content.split("\n", 1)[1].split("|")[0].split("\nImpossible")[0]
            for d in shown
        ]
        for text in maps:
            cells = [line.split() for line in text.replace("S", ".").replace("G", ".").splitlines()]
            free = [
                (r, c) for r, row in enumerate(cells) for c, sign in enumerate(row) if sign == "."
            ]
            assert split_of(f"plan_path5{free}") == "train"


def test_demonstrations_read_as_rollouts() -> None:
    """Without slips a demonstrated team solves in one turn, with the prompts of the orchestra, word for word."""
    tool, planner = list(
        puzzle_demonstrations(
            PUZZLES["plan_path"], 2, 2, roles=roles("tool", "planner"), slips={}, size=4
        )
    )
    prompt, reply = (message.content for message in tool.messages)
    puzzle = prompt.removeprefix("propose ").removesuffix("|")
    actions = reply.removeprefix("**Actions List**: ")
    assert planner.messages[0].content == f"decide {puzzle}||{actions}"
    assert planner.messages[1].content == f"#### {actions}"
    trajectory, prompts = play(
        game_team, ("tool", "planner"), reply, f"#### {actions}", task=replace(TASK, prompt=puzzle)
    )
    assert prompts == [prompt, planner.messages[0].content]
    assert trajectory.success == 1.0


def test_only_the_named_agents_slip() -> None:
    def outcomes(**slips: float) -> Counter[str]:
        """Of the first turns: whether the proposal was right, and whether the planner took it over."""
        shown = list(
            puzzle_demonstrations(
                PUZZLES["plan_path"],
                3,
                400,
                roles=roles("tool", "planner"),
                slips=slips,
                max_turns=1,
                size=4,
            )
        )
        pairs = zip(shown[::2], shown[1::2], strict=True)
        said = [
            [d.messages[-1].content.rpartition(": ")[2].removeprefix("#### ") for d in pair]
            for pair in pairs
        ]
        return Counter("same" if tool == planner else "mended" for tool, planner in said)

    assert outcomes() == {"same": 200}
    assert outcomes(tool=1.0) == {"mended": 200}
    assert outcomes(tool=1.0, planner=1.0) == {"same": 200}
    assert outcomes(tool=0.5)["same"] == pytest.approx(100, abs=25)


def programs(
    *replies: str,
    outputs: dict[str | tuple[str, str], str],
    orchestra: Any = game_team,
    names: tuple[str, ...] = ("tool", "planner"),
) -> tuple[Trajectory, list[str]]:
    """As `play`, and the first of the agents writes programs."""
    coder = replace(ROLES["game_coder"], system="", user=SHORT[names[0]])
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    team = make_team(engine, *names)
    agents = {**team.agents, names[0]: replace(team.agents[names[0]], role=coder)}
    make_env = partial(ENVS["plan_path"], sandbox=Canned(outputs))
    played = partial(orchestra, tool="program")
    [group] = asyncio.run(
        collect(
            [TASK], replace(team, agents=agents), make_env, played, group_size=1, seed=0, step=0
        )
    )
    return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]


def test_a_program_proposes_what_it_prints() -> None:
    search = "<think>I search.</think>```python\nsearch()\n```"
    outputs: dict[str | tuple[str, str], str] = {"search()": "2 steps\n**Actions List**: R R\n"}
    trajectory, prompts = programs(search, "#### R R", outputs=outputs)
    assert prompts[1] == f"decide {TASK.prompt}||R R"
    assert local(trajectory) == pytest.approx([BOTH, BOTH])
    assert [(event.after_turn, event.query.strip()) for event in trajectory.tools] == [
        (0, "search()")
    ]


@pytest.mark.parametrize(
    "reply", ["no idea", "```python\nfails()\n```", "```python\nsilent()\n```"]
)
def test_without_a_list_from_its_program_the_tool_agent_proposes_nothing(reply: str) -> None:
    trajectory, prompts = programs(reply, "#### R R", outputs={"silent()": "R R"})
    assert prompts[1] == f"decide {TASK.prompt}||"
    assert local(trajectory) == pytest.approx([-1.0, BOTH])  # as a malformed list of actions
    assert [turn.valid for turn in trajectory.turns] == [reply != "no idea", True]


def test_one_agent_alone_does_what_its_program_prints() -> None:
    replies = ("```python\nstep()\n```", "```python\nsilent()\n```", "```python\nstep()\n```")
    outputs: dict[str | tuple[str, str], str] = {"step()": "**Actions List**: R", "silent()": "R"}
    trajectory, prompts = programs(*replies, outputs=outputs, orchestra=single, names=("player",))
    assert prompts[1] == f"play {HALFWAY}|R\n{HALFWAY}\n"
    assert "(no actions)" in prompts[2]
    assert [turn.scores["team"] for turn in trajectory.turns] == pytest.approx(
        [ONE, -1.0, BOTH - ONE]
    )
    assert [event.after_turn for event in trajectory.tools] == [0, 1, 2]


def test_teams_that_leave_the_same_state_agree() -> None:
    both, half, none = (
        ["**Actions List**: R", "#### R R"],
        ["**Actions List**: R", "#### R"],
        ["x", "no"],
    )
    played = [play_team(*replies, max_turns=1)[0] for replies in (half, both, both, none)]
    assert [trajectory.answer for trajectory in played] == [
        HALFWAY,
        "S 1 3 G 1 3\n. . S",
        "S 1 3 G 1 3\n. . S",
        "",
    ]
    paid = majority(Group(task=TASK, trajectories=tuple(played)))
    assert [turn.reward for t in paid.trajectories for turn in t.turns] == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_d5_trajectories_without_a_tree_are_compared_where_they_meet_in_a_state() -> None:
    """By at_grpo, agent by agent: both tool agents begin in one state, their planners plan there, and no more meet.

    What they saw differs, as every planner was shown another proposal.
    """
    right, wrong = ["**Actions List**: R", "#### R"], ["**Actions List**: L", "#### L"]
    played = [
        play_team(*replies, max_turns=2)[0] for replies in ((*right, *right), (*wrong, *right))
    ]
    assert len({turn.state_key for t in played for turn in t.turns}) == 7
    anchors = [[turn.anchor for turn in t.turns] for t in played]
    assert anchors[0][:2] == anchors[1][:2] and anchors[0][2:] != anchors[1][2:]
    trajectories = tuple(replace(t, id=str(i), sample=i) for i, t in enumerate(played))
    samples = to_samples([local_team(Group(task=TASK, trajectories=trajectories))])
    credited = add_advantages(
        samples, dict.fromkeys(("tool", "planner"), AdvantageConfig(name="at_grpo"))
    )
    found = [[s.advantages[0] for s in credited if s.trajectory == t.id] for t in trajectories]  # type: ignore[index]
    half = 0.5**0.5  # two votes: (r - μ) / σ = ±1/√2
    assert found == [
        pytest.approx([half, half, 0, 0], abs=1e-5),
        pytest.approx([-half, -half, 0, 0], abs=1e-5),
    ]
