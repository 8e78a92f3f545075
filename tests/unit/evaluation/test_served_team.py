"""Calls to a whole served team: its answer, or an error if the team fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from mcore_mas.evaluation.served_team import ServedTeam
from rollout.base.errors import EnvError, Unscorable
from rollout.base.http_server import answering, listener_url, open_listener
from rollout.environments.protocol import Env, Step
from rollout.gateway.app import GatewayHandlers, gateway_app
from rollout.records.trajectory import Task
from rollout.teams.collect import Collector
from rollout.teams.team import TeamSession
from tests.support.gateway import scripted_team


class Desk:
    """Environment whose first step is a query, and whose second one is the answer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.queries = 0

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        if self.queries:
            raise Unscorable("nobody knows the answer")
        self.queries += 1
        return Step(observation=f"found {self.task.answers[0]}")


class ForgetfulDesk(Desk):
    async def step(self, action: str) -> Step:
        return Step(observation=self.task.answers[7])


class ClosedDesk(Desk):
    async def step(self, action: str) -> Step:
        raise EnvError("the desk is closed")


async def ask_desk(task: Task, team: TeamSession, env: Env) -> None:
    """Have agent `a` write a query, and agent `b` answer with the result of it."""
    query = await team.act("a", said=env.reset(task))
    step = await env.step(query.text)
    answer = await team.act("b", said=step.observation)
    await env.step(answer.text)


def reply_of_desk(folder: Path, make_env: Any) -> str | None:
    """Return the text with which a served team of two agents answers a call."""
    team, _ = scripted_team(
        folder, lambda prompt, n: "the answer" if "found ?" in prompt else "a query"
    )
    collector = Collector(team=team, make_env=make_env, orchestra=ask_desk, seed=0, step=0)
    served = ServedTeam(name="desk", env="desk", collector=collector)

    async def ask() -> str | None:
        listener = open_listener("127.0.0.1", 0)
        url = listener_url(listener)
        app = gateway_app(GatewayHandlers(lambda _: served, 4), "")
        async with (
            answering(app, listener, print),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
        ):
            reply = await api.chat.completions.create(
                model="desk", messages=[{"role": "user", "content": "which shelf?"}]
            )
            return reply.choices[0].message.content

    return asyncio.run(ask())


def test_the_last_action_is_the_answer_if_the_environment_cannot_score_it(tmp_path: Path) -> None:
    # The answer of the task is "?", as in a chat.
    assert reply_of_desk(tmp_path, Desk) == "the answer"


@pytest.mark.parametrize(
    ("make_env", "status", "error"),
    [
        (ForgetfulDesk, 500, "Defect: desk.step: IndexError: tuple index out of range"),
        (ClosedDesk, 503, "EnvError: the desk is closed"),
    ],
)
def test_a_failed_environment_is_an_error_and_a_line(
    make_env: Any, status: int, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        reply_of_desk(tmp_path, make_env)
    assert raised.value.status_code == status
    assert f"the team came to no answer: {error}" in str(raised.value)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("desk: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"desk: call 0 failed: {error}")
