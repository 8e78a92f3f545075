"""Calls to a whole served team: its answer, or an error if the team fails."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from mcore_mas.evaluation.served_team import ServedTeam
from rollout.base.errors import EnvError, Unscorable
from rollout.base.http_server import answering, listener_url, open_listener
from rollout.environments.code import CodeEnv
from rollout.environments.protocol import Env, PlayedEnv, Step
from rollout.gateway.app import GatewayHandlers, gateway_app
from rollout.orchestras import ORCHESTRAS
from rollout.orchestras.ab_mcts import Grading, ab_mcts
from rollout.records.trajectory import Task
from rollout.teams.collect import Collector
from rollout.teams.team import TeamSession
from tests.support.canned import Canned
from tests.support.casts import make_team
from tests.support.gateway import scripted_team
from tests.support.scripted_engine import ScriptedEngine

PROGRAM = "```python\nprint(1)\n```"


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
    return reply_of(ServedTeam(name="desk", env="desk", collector=collector))


def reply_of(served: ServedTeam) -> str | None:
    """Return the text with which a served team answers a call."""

    async def ask() -> str | None:
        listener = open_listener("127.0.0.1", 0)
        url = listener_url(listener)
        app = gateway_app(GatewayHandlers(lambda _: served, 4), "")
        async with (
            answering(app, listener, print),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
        ):
            reply = await api.chat.completions.create(
                model=served.name, messages=[{"role": "user", "content": "which shelf?"}]
            )
            return reply.choices[0].message.content

    return asyncio.run(ask())


def test_the_last_action_is_the_answer_if_the_environment_cannot_score_it(tmp_path: Path) -> None:
    # The answer of the task is "?", as in a chat.
    assert reply_of_desk(tmp_path, Desk) == "the answer"


@pytest.mark.parametrize(
    ("orchestra", "roles", "replies"),
    [
        ("tool_coder", {"coder": "session_coder", "reviewer": "session_reviewer"}, [PROGRAM]),
        (
            "code_reflect",
            {"planner": "code_planner", "coder": "code_writer", "reflector": "reflector"},
            ["a plan", "no program", "no reflection", "a plan", PROGRAM],
        ),
        (
            "coder_tester",
            {"coder": "coder", "tester": "tester"},
            [PROGRAM, "<input>\n1\n</input>\n<output>1</output>"],
        ),
        (
            partial(ab_mcts, max_nodes=2, grading=Grading(measure="visible_rate")),
            {"generator": "tree_coder"},
            [PROGRAM, PROGRAM.replace("1", "2")],
        ),
    ],
)
def test_a_coding_team_answers_with_its_first_program(
    orchestra: Any, roles: dict[str, str], replies: list[str]
) -> None:
    """Nobody knows the tests of the problem, so no program can fail them."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    collector = Collector(
        team=make_team(engine, roles),
        make_env=lambda task: CodeEnv(task, sandbox=Canned({})),
        orchestra=ORCHESTRAS.get(orchestra, orchestra),
        seed=0,
        step=0,
    )
    served = ServedTeam(name="coders", env="code", collector=collector)
    assert reply_of(served) == PROGRAM
    assert len(engine.calls) == len(replies)


def test_a_missing_method_of_the_environment_is_named(tmp_path: Path) -> None:
    async def preview(task: Task, team: TeamSession, env: PlayedEnv) -> None:
        await env.preview(env.reset(task))

    team, _ = scripted_team(tmp_path, lambda prompt, n: "")
    collector = Collector(team=team, make_env=Desk, orchestra=preview, seed=0, step=0)
    message = "no answer: EnvError: environment 'desk' cannot preview an action; use a team that"
    with pytest.raises(openai.InternalServerError, match=message):
        reply_of(ServedTeam(name="desk", env="desk", collector=collector))


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
