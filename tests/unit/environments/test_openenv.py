"""Environments of OpenEnv, with a server of its messages in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import EnvError
from rollout.base.network import free_port
from rollout.environments.openenv import OpenEnvEnv
from rollout.environments.protocol import Step
from rollout.records.trajectory import Status, Task
from rollout.tasks.generators import GENERATORS
from tests.support.casts import play

SERVER = str(Path(__file__).resolve().parents[2] / "support" / "openenv_server.py")
GAME: dict[str, Any] = {
    "command": [sys.executable, SERVER, "{port}", "1"],
    "action": {"guess": "{json}"},
    "observation": "{question}",
}


def make_task(**reset: Any) -> Task:
    """Return a task whose game begins with these arguments of the reset."""
    return Task(
        id="t",
        prompt="Play.",
        answers=(json.dumps(reset),),
        env="openenv",
        source="s",
        split="train",
    )


async def play_game(task: Task, *actions: str, **options: Any) -> tuple[str, list[Step]]:
    """Play a game without an agent; return the first observation and the steps."""
    env = OpenEnvEnv(task, **{**GAME, **options})
    try:
        await env.open(task)
        return env.reset(task), [await env.step(action) for action in actions]
    finally:
        await env.close()


def play_actions(*actions: str, **options: Any) -> tuple[str, list[Step]]:
    """Play the game with the secret 1."""
    return asyncio.run(play_game(make_task(secret=1), *actions, **options))


def test_a_game_is_played_over_a_websocket() -> None:
    first, steps = play_actions("0", "two", "1")
    assert first == "Play.\n\nGuess a number."
    assert [step.reward for step in steps] == [-0.25, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[1].observation == "This is no action; expected JSON.\n0 is wrong"
    assert steps[-1].metrics == {"solved": 1.0, "turns": 3.0, "malformed_actions": 1.0}


def test_the_sum_of_rewards_decides_whether_a_game_is_solved() -> None:
    _, steps = play_actions("0", "1", goal=0.8)
    assert steps[-1].metrics["solved"] == 0.0  # 1 - 0.25 = 0.75


def test_agents_may_write_whole_actions_and_see_all_fields() -> None:
    first, steps = play_actions('{"guess": 1}', action=None, observation="")
    assert first == 'Play.\n\n{"question": "Guess a number."}'
    assert steps[0].reward == 1.0
    _, steps = play_actions("[1]", "NaN", action=None)
    assert steps[1].metrics["malformed_actions"] == 2.0


def test_an_action_that_the_server_refuses_is_the_agents_mistake() -> None:
    _, [step] = play_actions('"a"')
    assert step.observation.startswith(
        "This is no action. guess: expected a number from 0 to 9\nGuess"
    )
    assert step.metrics["malformed_actions"] == 1.0


def test_games_wait_for_a_session_of_the_server() -> None:
    async def play_three(**options: Any) -> list[tuple[str, list[Step]]]:
        games = [play_game(make_task(secret=1), "0", "1", **options) for _ in range(3)]
        return await asyncio.gather(*games)

    for sessions in (1, 3):  # with three, the server refuses two until it has a free session
        games = asyncio.run(play_three(sessions=sessions))
        assert [steps[-1].reward for _, steps in games] == [1.0, 1.0, 1.0]


def test_a_game_may_be_played_by_several_servers() -> None:
    async def play_two() -> list[tuple[str, list[Step]]]:
        games = [play_game(make_task(secret=1), "1", servers=2) for _ in range(2)]
        return await asyncio.gather(*games)

    assert [steps[0].reward for _, steps in asyncio.run(play_two())] == [1.0, 1.0]


def test_an_agent_plays_the_game() -> None:
    trajectory, prompts = play(
        "single",
        {"player": "world_player"},
        "<action>2</action>",
        "<action>1</action>",
        task=make_task(secret=1),
        make_env=partial(OpenEnvEnv, **GAME),
    )
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert trajectory.outcome == 0.75
    assert "2 is wrong" in prompts[1]


@pytest.mark.parametrize(
    ("actions", "options", "message"),
    [
        (["7"], {"deadline_s": 1.0}, "did not answer within 1 s"),
        (["8"], {}, r"the environment failed \(EXECUTION_ERROR: the game is out of order\)"),
        (["9"], {"servers": 2}, "the session at http://127.0.0.1:.* broke"),
        ([], {"observation": "{answer}"}, "the observation has the fields question, metadata"),
        ([], {"command": ["/no/such", "{port}"]}, "'/no/such' cannot be started"),
        ([], {"command": [sys.executable, "-c", "exit('broken {port}')"]}, "ended: broken"),
    ],
)
def test_a_game_that_fails_is_an_error_of_one_line(
    actions: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvError, match=message):
        play_actions(*actions, **options)


@pytest.mark.parametrize("prize", [10**400, "high"])
def test_a_reward_that_is_no_finite_number_is_an_error(prize: Any) -> None:
    with pytest.raises(EnvError, match=r"openenv: the reward (10{39}|'high') is not a finite"):
        asyncio.run(play_game(make_task(secret=1, prize=prize), "1"))


def test_a_server_that_ended_is_started_again() -> None:
    with pytest.raises(EnvError, match="broke"):
        play_actions("9")
    _, steps = play_actions("1")
    assert steps[0].reward == 1.0


def test_a_server_that_does_not_listen_is_an_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EnvError, match=f"{url} does not answer"):
        play_actions(url=url, command=())


def test_games_of_one_task_must_begin_equally() -> None:
    async def play_twice() -> None:
        for _ in range(2):
            await play_game(make_task(shuffled=True))

    with pytest.raises(EnvError, match=r"two resets with \{\"shuffled\": true\} began with"):
        asyncio.run(play_twice())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ()}, "either `url` or `command`"),
        ({"url": "http://127.0.0.1:1"}, "either `url` or `command`"),
        ({"command": ["serve"]}, r"no '\{port\}'"),
        ({"action": {"guess": 1}}, "no value of `action`"),
        ({"observation": "{question"}, "`observation` is no format"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenEnvEnv(make_task(), **{**GAME, **options})


def test_the_key_of_a_game_is_the_arguments_of_its_reset() -> None:
    [task] = GENERATORS["openenv"].tasks(1, {"train": 1}, reset={"note": "Now."}, name="guess")
    arguments = json.loads(task.answers[0])
    assert arguments == {"note": "Now.", "seed": int(task.id.removeprefix("guess/"))}
    first, _ = asyncio.run(play_game(task))
    assert first == "Guess a number. Now."
    with pytest.raises(EnvError, match="the key of an OpenEnv game is the arguments of its reset"):
        asyncio.run(play_game(replace(task, answers=("7",))))
