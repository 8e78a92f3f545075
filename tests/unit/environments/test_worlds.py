"""Text worlds: Gymnasium as it is installed; ALFWorld and WebShop by stand-ins that have their classes' interfaces."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from rollout.base.errors import EnvError
from rollout.environments import text_world
from rollout.environments.protocol import AgentMistake, Env, Step
from rollout.environments.text_world import AlfworldEnv, GymnasiumEnv, Scene, WebshopEnv, WorldEnv
from rollout.records.files import RecordError
from rollout.records.trajectory import Status, Task
from rollout.tasks.generators import GENERATORS
from tests.support.casts import grow, play, validity
from tests.support.worlds import FakeAlfred, FakeShop, modules

LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "make": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
PLAYER = {"player": "world_player"}


def task(key: str, env: str = "gymnasium") -> Task:
    return Task(id="t", prompt="Play.", answers=(key,), env=env, source="s", split="train")


def said(action: str) -> str:
    return f"I think. <action> {action} </action>"


def played(make: Callable[[Task], Any], key: str, *actions: str) -> tuple[str, list[Step]]:
    """What the environment says at the start and to each action."""

    async def main() -> tuple[str, list[Step]]:
        env = make(task(key))
        try:
            await env.open(task(key))
            return env.reset(task(key)), [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(main())


class Guess(gymnasium.Env[str, str]):
    """Guess the word that the seed chose."""

    action_space = spaces.Text(4, charset="abc")
    observation_space = spaces.Text(20)
    closed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 2))
        return "Guess two letters.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "cab":
            raise RuntimeError("out of order")
        right = action == self.word
        return f"{action} is {'right' if right else 'wrong'}.", float(right), right, False, {}

    def close(self) -> None:
        type(self).closed += 1


class Levers(gymnasium.Env[Any, Any]):
    """Two levers, whose positions are the observation and their sum the reward."""

    action_space = spaces.MultiDiscrete([2, 3])
    observation_space = spaces.Box(0, 9, (2,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(action), float(sum(action)), False, True, {}


class Wheel(Levers):
    """Its action is a real number."""

    action_space = spaces.Box(-1, 1, (1,))


gymnasium.register("Guess-v0", Guess)
gymnasium.register("Levers-v0", Levers)
gymnasium.register("Wheel-v0", Wheel)


def test_frozen_lake_is_walked_over_by_the_names_of_its_actions() -> None:
    path = ["down", "Down", "right", "right", "1", "right"]
    shown, steps = played(partial(GymnasiumEnv, **LAKE), "3", *path)
    assert shown == "Play.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\nPossible actions: left, down, right, up"
    assert steps[0].observation.startswith("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\nPossible")
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert (steps[-1].done, steps[-1].metrics) == (
        True,
        {"solved": 1.0, "turns": 6.0, "malformed_actions": 0.0},
    )
    assert "Possible" not in steps[-1].observation


def test_falling_in_ends_a_game_and_does_not_solve_it() -> None:
    _, steps = played(partial(GymnasiumEnv, **LAKE), "3", "down", "right")
    assert (steps[-1].done, steps[-1].reward, steps[-1].metrics["solved"]) == (True, 0.0, 0.0)


def test_a_text_that_is_no_action_changes_nothing_and_is_counted() -> None:
    make = partial(GymnasiumEnv, **LAKE, malformed=-0.5, max_turns=2)
    _, [first, second] = played(make, "3", "jump", "7")
    assert first.observation.startswith(
        "This is no action; expected one of left, down, right, up.\n[S]FFF"
    )
    assert (first.reward, first.done, second.reward, second.done) == (-0.5, False, -0.5, True)
    assert second.metrics == {"solved": 0.0, "turns": 2.0, "malformed_actions": 2.0}
    with pytest.raises(EnvError, match="after the end"):
        played(make, "3", "up", "up", "up")


def test_the_same_seed_is_the_same_slippery_game() -> None:
    make = partial(GymnasiumEnv, id="FrozenLake-v1", make={"render_mode": "ansi"})
    first = {key: played(make, key, "2")[1][0].observation for key in map(str, range(12))}
    assert first == {key: played(make, key, "2")[1][0].observation for key in first}
    assert len(set(first.values())) == 3  # right may slip up, which stays, or down


def test_texts_and_numbers_are_actions_where_the_space_takes_them() -> None:
    before = Guess.closed
    world = Guess()
    world.reset(seed=11)
    shown, [wrong, right] = played(
        partial(GymnasiumEnv, id="Guess-v0"), "11", "c", f" {world.word}\n"
    )
    assert shown == "Play.\n\nGuess two letters."
    assert (wrong.observation, wrong.metrics["solved"]) == ("c is wrong.", 0.0)
    assert (right.reward, right.done, right.metrics["solved"]) == (1.0, True, 1.0)
    assert Guess.closed == before + 1
    _, [levers] = played(partial(GymnasiumEnv, id="Levers-v0", goal=1.0), "1", "1, 2")
    assert (levers.observation, levers.reward, levers.done) == ("[1, 2]", 3.0, True)
    assert levers.metrics["solved"] == 0.0  # it was cut off, not ended
    _, [bad] = played(partial(GymnasiumEnv, id="Guess-v0"), "11", "xyz")
    assert bad.metrics["malformed_actions"] == 1.0


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"id": "Nope-v0"}, "1", "gymnasium cannot make 'Nope-v0'"),
        ({"id": "Wheel-v0"}, "1", "'Wheel-v0' takes Box.* expected Discrete, MultiDiscrete, Text"),
        ({"id": "FrozenLake-v1", "actions": ["go"]}, "1", "there cannot be 1 names of actions"),
        ({"id": "FrozenLake-v1"}, "left", "its seed, a number, and not 'left'"),
    ],
)
def test_a_world_that_cannot_be_had_is_one_line(
    options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(EnvError, match=message):
        played(partial(GymnasiumEnv, **options), key, "x")


def test_a_world_that_breaks_fails_its_trajectory_and_is_closed() -> None:
    before = Guess.closed
    make = partial(GymnasiumEnv, id="Guess-v0")
    trajectory, _ = play("single", PLAYER, said("a"), said("cab"), task=task("11"), make_env=make)
    assert trajectory.status is Status.FAILED
    assert trajectory.error == "EnvError: the world failed (RuntimeError: out of order)"
    assert Guess.closed == before + 1


def test_one_agent_plays_as_react_does() -> None:
    replies = [
        said("down"),
        "no action",
        said("down"),
        said("right"),
        said("right"),
        said("down"),
        said("right"),
    ]
    trajectory, prompts = play(
        "single",
        PLAYER,
        *replies,
        task=task("3"),
        make_env=partial(GymnasiumEnv, **LAKE),
        max_turns=9,
    )
    assert (
        trajectory.outcome,
        trajectory.metrics["solved"],
        trajectory.metrics["malformed_actions"],
    ) == (
        1.0,
        1.0,
        1.0,
    )
    assert validity(trajectory) == [True, False, *[True] * 5]
    assert "down\n  (Down)" in prompts[1] and "This is no action" in prompts[2]


def test_worlds_grow_as_trees() -> None:
    right = {
        ("player", turn, ""): said(move) for turn, move in enumerate(["down", "down", "right"])
    }
    left = {("player", turn, node): said("left") for turn, node in enumerate(["1", "0.1", "0.0.1"])}
    make = partial(GymnasiumEnv, **LAKE)
    trajectory = grow("single", PLAYER, right | left, task=task("3"), make_env=make, max_turns=3)
    assert (trajectory.status, len(trajectory.turns), trajectory.leaf) == (
        Status.COMPLETED,
        6,
        "0.0.0",
    )


def test_a_world_that_hangs_is_given_up() -> None:
    class Slow(WorldEnv):
        def start(self, key: str) -> Scene:
            time.sleep(0.3)
            return Scene(text="late")

        def act(self, action: str) -> Scene:
            raise AgentMistake("no")

    with pytest.raises(EnvError, match=r"did not answer within 0\.05 s"):
        played(partial(Slow, deadline_s=0.05), "1", "x")
    with pytest.raises(EnvError, match="used before open"):
        Slow(task("1")).reset(task("1"))


@pytest.fixture
def alfred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of games, with ALFWorld's modules in place."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "base_config.yaml").write_text(yaml.safe_dump({"env": {"type": "AlfredTWEnv"}}))
    for name in ("train/a", "train/b", "train/movable_c", "valid_seen/d", "valid_unseen/e"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "game.tw-pddl").write_text("{}")
    text_world.load_games.cache_clear()
    yield tmp_path
    text_world.load_games.cache_clear()


def test_alfworld_games_are_played_through_its_interface(alfred: Path) -> None:
    make: Callable[[Task], Env] = partial(AlfworldEnv, config=str(alfred / "base_config.yaml"))
    made = FakeAlfred.made
    [game] = GENERATORS["alfworld"].tasks(1, {"test": 1}, folder=str(alfred))
    shown, steps = played(
        make, game.answers[0], "open sesame", "go to fridge 1", "take apple 1 from fridge 1"
    )
    assert (
        "Your task is to: take the apple.\nPossible actions: go to fridge 1, take apple 1" in shown
    )
    assert [(step.reward, step.done) for step in steps] == [(0, False), (0, False), (1, True)]
    assert steps[0].observation.startswith("Nothing happens.")
    assert steps[-1].metrics["solved"] == 1.0
    played(make, game.answers[0], "look")
    assert FakeAlfred.made == made + 1  # its folder is read once
    with pytest.raises(EnvError, match=r"no such game; run `alfworld-download`"):
        played(make, "/no/such/game", "look")


def test_alfworld_tasks_are_its_own_splits(alfred: Path) -> None:
    tasks = GENERATORS["alfworld"].tasks(
        1, {"train": 2, "validation": 1, "test": 1}, folder=str(alfred)
    )
    assert sorted(t.id for t in tasks) == [
        "alfworld/train/a",
        "alfworld/train/b",
        "alfworld/valid_seen/d",
        "alfworld/valid_unseen/e",
    ]
    with pytest.raises(ValueError, match="3 train tasks asked for, but there are 2"):
        GENERATORS["alfworld"].tasks(1, {"train": 3}, folder=str(alfred))
    with pytest.raises(RecordError, match=r"expected ALFWorld's json_2\.1\.1"):
        GENERATORS["alfworld"].tasks(1, {"train": 1}, folder=str(alfred / "train"))


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """WebShop's module in place."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    text_world.load_shop.cache_clear()
    yield
    text_world.load_shop.cache_clear()


def test_webshop_errands_are_run_through_its_interface(shop: None) -> None:
    loaded = FakeShop.loaded
    errand = ["search[hat]", "click[blue hat]", "click[buy now]"]
    shown, steps = played(WebshopEnv, "1", *errand)
    assert shown.endswith("i need blue hat [SEP] Search\nPossible actions: search[words]")
    assert (
        "Possible actions: click[back to search], click[red shoes], click[blue hat]"
        in steps[0].observation
    )
    assert [(step.reward, step.done) for step in steps] == [(0, False), (0, False), (1, True)]
    _, other = played(WebshopEnv, "0", "buy it", *errand)
    assert other[0].observation.startswith("This is no action; expected search[words] or click[")
    assert (other[-1].reward, other[-1].metrics["solved"]) == (0.5, 0.0)  # bought something else
    played(WebshopEnv, "1", "search[hat]")
    assert FakeShop.loaded == loaded + 1  # one shop for all trajectories
    with pytest.raises(EnvError, match="the shop has 3 goals, and no goal 7"):
        played(WebshopEnv, "7", "x")


def test_webshop_goals_are_split_as_published() -> None:
    tasks = GENERATORS["webshop"].tasks(1, {"train": 50, "validation": 50, "test": 500})
    goals = {
        split: [int(t.answers[0]) for t in tasks if t.split == split]
        for split in ("train", "validation", "test")
    }
    assert sorted(goals["test"]) == list(range(500))
    assert 500 <= min(goals["validation"]) <= max(goals["validation"]) < 1500 <= min(goals["train"])


def test_gymnasium_seeds_belong_to_one_split() -> None:
    generate = GENERATORS["gymnasium"].tasks
    tasks = [
        t
        for seed in (1, 2)
        for t in generate(seed, {"train": 50, "test": 50}, name="lake", instructions="Go.")
    ]
    seeds = [{t.answers for t in tasks if t.split == split} for split in ("train", "test")]
    assert not seeds[0] & seeds[1] and len(seeds[0] | seeds[1]) == 200
    assert {(t.prompt, t.env, t.source) for t in tasks} == {("Go.", "gymnasium", "lake")}


@pytest.mark.parametrize(
    ("make", "library", "message"),
    [
        (partial(GymnasiumEnv, id="x"), "gymnasium", r"pip install mcore-mas\[gymnasium\]"),
        (partial(AlfworldEnv, config="missing.yaml"), "alfworld", "pip install alfworld"),
        (WebshopEnv, "web_agent_site", "github.com/princeton-nlp/WebShop"),
    ],
)
def test_a_missing_library_is_named(
    make: Callable[[Task], Any],
    library: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    game = tmp_path / "1"
    game.touch()
    monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvError, match=message):
        played(make, str(game) if library == "alfworld" else "1", "x")
