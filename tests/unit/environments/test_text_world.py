"""Text worlds: Gymnasium itself, and stand-ins with the interfaces of ALFWorld and WebShop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from rollout.environments.protocol import AgentMistake, Step
from rollout.environments.text_world import (
    AlfworldEnv,
    GymnasiumEnv,
    Scene,
    ThreadWorldEnv,
    WebshopEnv,
)
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


def make_task(key: str) -> Task:
    """Return a task whose answer is the key of a game."""
    return Task(id="t", prompt="Play.", answers=(key,), env="gymnasium", source="s", split="train")


def reply(action: str) -> str:
    """Return an agent's reply with an action."""
    return f"I think. <action> {action} </action>"


def play_actions(
    make_env: Callable[[Task], Any], key: str, *actions: str
) -> tuple[str, list[Step]]:
    """Play a game without an agent; return the first observation and the steps."""
    task = make_task(key)

    async def run() -> tuple[str, list[Step]]:
        env = make_env(task)
        try:
            await env.open(task)
            first_observation = env.reset(task)
            return first_observation, [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(run())


class Guess(gymnasium.Env[str, str]):
    """Game of guessing two letters, which the seed chooses; the action `cab` breaks it."""

    action_space = spaces.Text(4, charset="abc")
    observation_space = spaces.Text(20)
    closed = 0  # number of games that were closed

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 2))
        return "Guess two letters.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "cab":
            raise RuntimeError("out of order")
        is_right = action == self.word
        observation = f"{action} is {'right' if is_right else 'wrong'}."
        return observation, float(is_right), is_right, False, {}

    def close(self) -> None:
        type(self).closed += 1


class Levers(gymnasium.Env[Any, Any]):
    """Game of one step with two levers: the action is the observation, and its sum the reward."""

    action_space = spaces.MultiDiscrete([2, 3])
    observation_space = spaces.Box(0, 9, (2,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(action), float(sum(action)), False, True, {}


class Wheel(Levers):
    """Game whose action is a real number."""

    action_space = spaces.Box(-1, 1, (1,))


gymnasium.register("Guess-v0", Guess)
gymnasium.register("Levers-v0", Levers)
gymnasium.register("Wheel-v0", Wheel)


def test_frozen_lake_is_solved_by_named_and_numbered_actions() -> None:
    path = ["down", "Down", "right", "right", "1", "right"]
    first, steps = play_actions(partial(GymnasiumEnv, **LAKE), "3", *path)
    assert first == "Play.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\nPossible actions: left, down, right, up"
    assert steps[0].observation.startswith("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\nPossible")
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1].done
    assert steps[-1].metrics == {"solved": 1.0, "turns": 6.0, "malformed_actions": 0.0}
    assert "Possible" not in steps[-1].observation


def test_a_hole_ends_frozen_lake_unsolved() -> None:
    _, steps = play_actions(partial(GymnasiumEnv, **LAKE), "3", "down", "right")
    assert steps[-1].done
    assert steps[-1].reward == 0.0
    assert steps[-1].metrics["solved"] == 0.0


def test_a_malformed_action_changes_nothing_and_takes_a_turn() -> None:
    make_env = partial(GymnasiumEnv, **LAKE, malformed=-0.5, max_turns=2)
    _, [first, second] = play_actions(make_env, "3", "jump", "7")
    expected = "This is no action; expected one of left, down, right, up.\n[S]FFF"
    assert first.observation.startswith(expected)
    assert (first.reward, first.done) == (-0.5, False)
    assert (second.reward, second.done) == (-0.5, True)
    assert second.metrics == {"solved": 0.0, "turns": 2.0, "malformed_actions": 2.0}


def test_a_step_after_the_end_is_an_error() -> None:
    make_env = partial(GymnasiumEnv, **LAKE, max_turns=2)
    with pytest.raises(EnvError, match="after the end"):
        play_actions(make_env, "3", "up", "up", "up")


def test_the_key_of_a_game_is_the_seed_of_its_random_choices() -> None:
    make_env = partial(GymnasiumEnv, id="FrozenLake-v1", make={"render_mode": "ansi"})

    def observations_after_right() -> list[str]:
        steps = [play_actions(make_env, str(seed), "2")[1] for seed in range(12)]
        return [step.observation for [step] in steps]

    observations = observations_after_right()
    assert observations_after_right() == observations
    # The player may go right, slip down, or slip up and stay.
    assert len(set(observations)) == 3


def test_an_action_may_be_a_text() -> None:
    closed_before = Guess.closed
    game = Guess()
    game.reset(seed=11)
    make_env = partial(GymnasiumEnv, id="Guess-v0")
    first, [wrong, right] = play_actions(make_env, "11", "c", f" {game.word}\n")
    assert first == "Play.\n\nGuess two letters."
    assert wrong.observation == "c is wrong."
    assert wrong.metrics["solved"] == 0.0
    assert (right.reward, right.done) == (1.0, True)
    assert right.metrics["solved"] == 1.0
    assert Guess.closed == closed_before + 1

    _, [malformed] = play_actions(make_env, "11", "xyz")  # letters that the space lacks
    assert malformed.metrics["malformed_actions"] == 1.0


def test_an_action_may_be_several_numbers() -> None:
    make_env = partial(GymnasiumEnv, id="Levers-v0", goal=1.0)
    _, [step] = play_actions(make_env, "1", "1, 2")
    assert step.observation == "[1, 2]"
    assert (step.reward, step.done) == (3.0, True)
    assert step.metrics["solved"] == 0.0  # the game was truncated and has not ended by itself


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"id": "Nope-v0"}, "1", "gymnasium cannot make 'Nope-v0'"),
        ({"id": "Wheel-v0"}, "1", "'Wheel-v0' takes Box.* expected Discrete, MultiDiscrete, Text"),
        ({"id": "FrozenLake-v1", "actions": ["go"]}, "1", "there cannot be 1 names of actions"),
        ({"id": "FrozenLake-v1"}, "left", "its seed, a number, and not 'left'"),
    ],
)
def test_a_game_that_cannot_be_opened_is_an_error(
    options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(EnvError, match=message):
        play_actions(partial(GymnasiumEnv, **options), key, "x")


def test_a_game_that_breaks_fails_its_trajectory_and_is_closed() -> None:
    closed_before = Guess.closed
    make_env = partial(GymnasiumEnv, id="Guess-v0")
    trajectory, _ = play(
        "single", PLAYER, reply("a"), reply("cab"), task=make_task("11"), make_env=make_env
    )
    assert trajectory.status is Status.FAILED
    assert trajectory.error == "EnvError: the world failed (RuntimeError: out of order)"
    assert Guess.closed == closed_before + 1


def test_a_single_agent_reads_its_actions_and_their_observations() -> None:
    replies = [reply(action) for action in ("down", "down", "right", "right", "down", "right")]
    replies.insert(1, "no action")
    trajectory, prompts = play(
        "single",
        PLAYER,
        *replies,
        task=make_task("3"),
        make_env=partial(GymnasiumEnv, **LAKE),
        max_turns=9,
    )
    assert trajectory.outcome == 1.0
    assert trajectory.metrics["solved"] == 1.0
    assert trajectory.metrics["malformed_actions"] == 1.0
    assert validity(trajectory) == [True, False, *[True] * 5]
    assert "down\n  (Down)" in prompts[1]
    assert "This is no action" in prompts[2]


def test_a_game_may_be_played_as_a_tree() -> None:
    replies = {
        ("player", 0, ""): reply("down"),
        ("player", 1, ""): reply("down"),
        ("player", 2, ""): reply("right"),
        ("player", 0, "1"): reply("left"),
        ("player", 1, "0.1"): reply("left"),
        ("player", 2, "0.0.1"): reply("left"),
    }
    make_env = partial(GymnasiumEnv, **LAKE)
    trajectory = grow(
        "single", PLAYER, replies, task=make_task("3"), make_env=make_env, max_turns=3
    )
    assert trajectory.status is Status.COMPLETED
    assert len(trajectory.turns) == 6
    assert trajectory.leaf == "0.0.0"


class SlowWorld(ThreadWorldEnv):
    """World that takes 0.3 s to start."""

    def start(self, key: str) -> Scene:
        time.sleep(0.3)
        return Scene(text="late")

    def act(self, action: str) -> Scene:
        raise AgentMistake("no")


def test_a_world_that_exceeds_its_deadline_is_an_error() -> None:
    with pytest.raises(EnvError, match=r"did not answer within 0\.05 s"):
        play_actions(partial(SlowWorld, deadline_s=0.05), "1", "x")


def test_a_world_must_be_opened_before_it_is_reset() -> None:
    task = make_task("1")
    with pytest.raises(EnvError, match="used before open"):
        SlowWorld(task).reset(task)


@pytest.fixture
def alfworld_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of games, with stand-ins for ALFWorld's modules."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "base_config.yaml").write_text(yaml.safe_dump({"env": {"type": "AlfredTWEnv"}}))
    for name in ("train/a", "train/b", "train/movable_c", "valid_seen/d", "valid_unseen/e"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "game.tw-pddl").write_text("{}")
    text_world.load_alfworld.cache_clear()
    yield tmp_path
    text_world.load_alfworld.cache_clear()


def test_alfworld_games_are_played_through_its_interface(alfworld_folder: Path) -> None:
    make_env = partial(AlfworldEnv, config=str(alfworld_folder / "base_config.yaml"))
    made_before = FakeAlfred.made
    [task] = GENERATORS["alfworld"].tasks(1, {"test": 1}, folder=str(alfworld_folder))
    key = task.answers[0]
    first, steps = play_actions(
        make_env, key, "open sesame", "go to fridge 1", "take apple 1 from fridge 1"
    )
    possible = "Possible actions: go to fridge 1, take apple 1"
    assert f"Your task is to: take the apple.\n{possible}" in first
    assert [(step.reward, step.done) for step in steps] == [(0, False), (0, False), (1, True)]
    assert steps[0].observation.startswith("Nothing happens.")
    assert steps[-1].metrics["solved"] == 1.0

    play_actions(make_env, key, "look")
    assert FakeAlfred.made == made_before + 1  # the folder is read once
    with pytest.raises(EnvError, match=r"no such game; run `alfworld-download`"):
        play_actions(make_env, "/no/such/game", "look")


def test_alfworld_games_that_start_together_read_the_folder_once(
    alfworld_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class SlowAlfred(FakeAlfred):
        def __init__(self, config: dict[str, Any], train_eval: str = "train") -> None:
            time.sleep(0.2)
            super().__init__(config, train_eval)
            made.append(self)

    environments = sys.modules["alfworld.agents.environment"]
    monkeypatch.setattr(environments, "get_environment", lambda name: SlowAlfred)
    key = str(alfworld_folder / "train/a/game.tw-pddl")
    config = str(alfworld_folder / "base_config.yaml")
    games = [AlfworldEnv(make_task(key), config=config) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda game: game.start(key), games))
    assert len(made) == 1


def test_alfworld_tasks_keep_its_splits(alfworld_folder: Path) -> None:
    counts = {"train": 2, "validation": 1, "test": 1}
    tasks = GENERATORS["alfworld"].tasks(1, counts, folder=str(alfworld_folder))
    assert sorted(task.id for task in tasks) == [
        "alfworld/train/a",
        "alfworld/train/b",
        "alfworld/valid_seen/d",
        "alfworld/valid_unseen/e",
    ]


@pytest.mark.parametrize(
    ("subfolder", "count", "error", "message"),
    [
        ("", 3, ValueError, "3 train tasks asked for, but there are 2"),
        ("train", 1, RecordError, r"expected ALFWorld's json_2\.1\.1"),
    ],
)
def test_alfworld_tasks_need_enough_games_in_the_right_folder(
    alfworld_folder: Path, subfolder: str, count: int, error: type[Exception], message: str
) -> None:
    folder = str(alfworld_folder / subfolder)
    with pytest.raises(error, match=message):
        GENERATORS["alfworld"].tasks(1, {"train": count}, folder=folder)


@pytest.fixture
def webshop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace WebShop's module by a stand-in."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    text_world.load_shop.cache_clear()
    yield
    text_world.load_shop.cache_clear()


PURCHASE = ["search[hat]", "click[blue hat]", "click[buy now]"]


def test_webshop_is_played_through_its_interface(webshop: None) -> None:
    first, steps = play_actions(WebshopEnv, "1", *PURCHASE)
    assert first.endswith("i need blue hat [SEP] Search\nPossible actions: search[words]")
    possible = "Possible actions: click[back to search], click[red shoes], click[blue hat]"
    assert possible in steps[0].observation
    assert [(step.reward, step.done) for step in steps] == [(0, False), (0, False), (1, True)]


def test_webshop_is_unsolved_if_another_product_is_bought(webshop: None) -> None:
    _, steps = play_actions(WebshopEnv, "0", "buy it", *PURCHASE)
    expected = "This is no action; expected search[words] or click["
    assert steps[0].observation.startswith(expected)
    assert steps[-1].reward == 0.5
    assert steps[-1].metrics["solved"] == 0.0


def test_webshop_is_loaded_once_for_all_trajectories(webshop: None) -> None:
    loaded_before = FakeShop.loaded
    play_actions(WebshopEnv, "1", "search[hat]")
    play_actions(WebshopEnv, "0", "search[hat]")
    assert FakeShop.loaded == loaded_before + 1


def test_an_unknown_goal_of_webshop_is_an_error(webshop: None) -> None:
    with pytest.raises(EnvError, match="the shop has 3 goals, and no goal 7"):
        play_actions(WebshopEnv, "7", "x")


def test_webshop_goals_are_split_as_published() -> None:
    tasks = GENERATORS["webshop"].tasks(1, {"train": 50, "validation": 50, "test": 500})
    goals: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for task in tasks:
        goals[task.split].append(int(task.answers[0]))
    assert sorted(goals["test"]) == list(range(500))
    assert all(500 <= goal < 1500 for goal in goals["validation"])
    assert all(goal >= 1500 for goal in goals["train"])


def test_a_gymnasium_seed_belongs_to_one_split() -> None:
    tasks: list[Task] = []
    for seed in (1, 2):
        tasks += GENERATORS["gymnasium"].tasks(
            seed, {"train": 50, "test": 50}, name="lake", instructions="Go."
        )
    train_seeds = {task.answers for task in tasks if task.split == "train"}
    test_seeds = {task.answers for task in tasks if task.split == "test"}
    assert not train_seeds & test_seeds
    assert len(train_seeds | test_seeds) == 200
    assert {(task.prompt, task.env, task.source) for task in tasks} == {
        ("Go.", "gymnasium", "lake")
    }


@pytest.mark.parametrize(
    ("make_env", "library", "message"),
    [
        (partial(GymnasiumEnv, id="x"), "gymnasium", r"pip install mcore-mas\[gymnasium\]"),
        (partial(AlfworldEnv, config="missing.yaml"), "alfworld", "pip install alfworld"),
        (WebshopEnv, "web_agent_site", "github.com/princeton-nlp/WebShop"),
    ],
)
def test_the_error_of_a_missing_library_says_how_to_install_it(
    make_env: Callable[[Task], Any],
    library: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    submodules = [name for name in sys.modules if name.startswith(f"{library}.")]
    for name in (library, *submodules):
        monkeypatch.setitem(sys.modules, name, None)
    key = "1"
    if library == "alfworld":  # whose keys are files
        game = tmp_path / "game"
        game.touch()
        key = str(game)
    with pytest.raises(EnvError, match=message):
        play_actions(make_env, key, "x")
