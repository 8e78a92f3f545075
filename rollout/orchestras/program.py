"""Agent programs of one's own: any code that speaks OpenAI's or Anthropic's API plays a task through the gateway."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.base.async_tasks import cancel_tasks
from rollout.base.deadlines import LateTool, with_deadline
from rollout.base.event_loop import per_loop
from rollout.base.lookup import lookup
from rollout.base.processes import run_command
from rollout.base.signatures import check_call
from rollout.base.text import valid_text
from rollout.base.urls import without_proxy
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.sandbox.guest.filters import can_confine, confine_program
from rollout.sandbox.tiers import readable_paths
from rollout.teams.source_checks import misused
from rollout.teams.team import TeamSession

_MOST_BYTES = 1 << 20  # of a program's output
_SHOWN_CHARS = 2000  # of what it said as it failed


class ProgramFailed(RuntimeError):
    """An agent program ended without an answer, by its own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an agent program is given: a task, and where its models are."""

    task: Task
    problem: str  # as the environment states it
    openai_url: str  # base URL of OpenAI's clients
    anthropic_url: str  # base URL of Anthropic's
    key: str  # for either

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a command is given; the clients read the first four by themselves."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "TASK": self.problem
            if len(self.problem) < 100_000 and "\0" not in self.problem
            else "",
            "TASK_ID": self.task.id,
        }


def check_program(
    team: Collection[str],
    *,
    call: str | None = None,
    command: Sequence[str] | None = None,
    models: Mapping[str, str] | None = None,
    sandbox: Sequence[str] | None = None,
    **others: object,
) -> None:
    """Refuse options of `program` that no trajectory of a team with these agents could be played with.

    Raises:
        ValueError: there is not one of `call` and `command`, `call` is no async function that can be imported or asks
            its `Job` what that lacks, `models` names an agent who is not there, or what is to be in the sandbox cannot
            be.
    """
    if (call is None) is (command is None):
        raise ValueError(
            "orchestra 'program' needs call (a function's import path) or command, one of them"
        )
    if call is not None:
        function = lookup("agent program", call, _NO_PROGRAMS)
        check_call(f"agent program '{call}'", function, ("job",), coroutine=True, keywords=())
        if unknown := misused(function, Job):
            raise ValueError(f"agent program '{call}': {unknown}")
    for model, agent in (models or {}).items():
        if agent not in team:
            raise ValueError(
                f"models: '{model}' is agent '{agent}', who is not in the team; agents: {', '.join(team)}"
            )
    if sandbox is not None and command is None:
        raise ValueError("sandbox: a function runs in this process; only a command can be confined")
    if missing := [path for path in sandbox or () if not Path(path).exists()]:
        raise ValueError(f"sandbox: there is no '{missing[0]}' for the command to read")
    if sandbox is not None and not can_confine():
        raise ValueError(
            "sandbox: to confine a command that calls models needs Linux 6.12 or later, on x86_64"
        )


_NO_PROGRAMS: Mapping[str, Callable[[Job], Awaitable[str]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRules:
    """How much a program may take, and what its failure means.

    Args:
        deadline_s: that the program may take.
        most_calls: of models, in a trajectory.
        at_once: commands that run side by side.
        crash: what becomes of a trajectory whose program fails: `fail`, it is quarantined; `wrong`, its answer is "".
    """

    deadline_s: PositiveFloat = 600.0
    most_calls: PositiveInt = 256
    at_once: PositiveInt = 64
    crash: Literal["fail", "wrong"] = "fail"


async def program(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    call: str | None = None,
    command: Annotated[Sequence[str], Field(min_length=1)] | None = None,
    models: Mapping[str, str] | None = None,
    sandbox: Sequence[str] | None = None,
    rules: ProgramRules = ProgramRules(),
) -> None:
    """Let a program play that knows nothing of this project: it calls the team's agents as models of an API.

    The program answers with a text that the environment is stepped with, once.

    Args:
        call: import path of an async function that takes a `Job` and returns the answer.
        command: program and arguments, run without a shell. It gets the problem on standard input and in TASK, the
            gateway's addresses in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, and answers on standard output.
        models: agents by the names that the program has for its models; `*` is any other name.
        sandbox: the files and folders that a command may read, besides the system's and this Python's; it then writes
            in a folder of its own only, and reaches nothing but the gateway. Without it the command is not confined.
        rules: how much it may take, and what its failure means.

    Raises:
        ValueError: as `check_program`.
        ProgramFailed: the program failed.
        LateTool: it took too long.
    """
    from rollout.gateway.app import shared_gateway  # a web server, which only this orchestra needs
    from rollout.gateway.sessions import GatewaySession

    check_program(
        [agent.name for agent in team.agents],
        call=call,
        command=command,
        models=models,
        sandbox=sandbox,
    )
    problem = valid_text(env.reset(task))
    os.environ.update(
        without_proxy("127.0.0.1", "localhost")
    )  # for clients of a function, and of commands
    async with shared_gateway() as gateway:
        session = GatewaySession(team, aliases=models or {}, max_turns=rules.most_calls)
        async with gateway.serve_session(session) as (url, key):
            job = Job(
                task=task, problem=problem, openai_url=f"{url}/v1", anthropic_url=url, key=key
            )
            if command is not None:
                work: Awaitable[str] = _run(tuple(command), job, sandbox, rules)
            else:
                playing = _played(lookup("agent program", str(call), _NO_PROGRAMS)(job))
                work = with_deadline(rules.deadline_s, playing, _late)
            try:
                answer = await _unless_failed(work, session.failure)
            except ProgramFailed as failed:
                if rules.crash == "fail":
                    raise (session.overlong or failed) from failed.__cause__
                answer = ""
    await env.step(answer)


async def _unless_failed(work: Awaitable[str], failure: asyncio.Future[Exception]) -> str:
    """What the work gives; it is ended when there is a failure, which is raised."""
    playing = asyncio.ensure_future(work)
    try:
        first: set[asyncio.Future[Any]] = {playing, failure}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return playing.result()
    finally:
        await cancel_tasks([playing])


def _late(why: str) -> LateTool:
    return LateTool(f"program: {why}", "tool/program")


async def _played(work: Awaitable[str]) -> str:
    """What an async function answers; whatever it raises, or that it exits or cancels itself, is its failure."""
    try:
        answer = await work
    except (
        Exception,
        SystemExit,
        asyncio.CancelledError,
    ) as error:  # of our own cancelling nobody reads it
        raise ProgramFailed(f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]) from error
    if not isinstance(answer, str):
        raise ProgramFailed(f"it returned {type(answer).__name__}; expected a text")
    return answer


async def _run(
    command: Sequence[str], job: Job, sandbox: Sequence[str] | None, rules: ProgramRules
) -> str:
    """What a command prints that is one of so many at once."""
    environment = {**os.environ, **job.environment}
    run = partial(run_command, command, job.problem.encode(), max_output_bytes=_MOST_BYTES)
    try:
        async with per_loop(
            ("agent programs", rules.at_once), partial(asyncio.Semaphore, rules.at_once)
        ):
            with TemporaryDirectory() as own:
                if sandbox is not None:
                    environment |= {"HOME": own, "TMPDIR": own}
                    run = partial(run, confine=_confinement(sandbox, own, job.openai_url))
                ended = await with_deadline(rules.deadline_s, run(env=environment), _late)
    except (OSError, ValueError, SubprocessError) as error:
        raise ProgramFailed(f"'{command[0]}': {error}") from error
    if ended.returncode:
        said = (
            ended.stderr.decode("utf-8", "replace")
            .replace(job.key, "[key]")
            .strip()[-_SHOWN_CHARS:]
        )
        raise ProgramFailed(
            f"'{command[0]}' ended with status {ended.returncode}: {said or 'it said nothing'}"
        )
    return ended.stdout.decode("utf-8", "replace").replace(job.key, "[key]").strip()


_NETWORK_FILES = ("ssl", "hosts", "mime.types", "nsswitch.conf", "passwd", "resolv.conf")  # in /etc


def _confinement(readable: Sequence[str], own: str, url: str) -> Callable[[], None]:
    """What a new process calls to be confined to these files, its own folder and the port of a URL."""
    known = [*readable_paths(), sys.prefix, *(f"/etc/{name}" for name in _NETWORK_FILES)]
    paths = [*known, *map(os.path.abspath, readable)]
    return partial(confine_program, readable=paths, writable=[own], port=urlsplit(url).port or 0)
