"""Orchestra `program`: agent programs that call the team through OpenAI's or Anthropic's API.

A program is an async function that takes a `Job`, or a command that gets the job in environment
variables. Its calls go to the gateway (`rollout.gateway`), where each call becomes a turn.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.base.async_tasks import cancel_tasks
from rollout.base.deadlines import LateTool, with_deadline
from rollout.base.errors import Unasked
from rollout.base.event_loop import per_loop
from rollout.base.lookup import lookup
from rollout.base.processes import run_command
from rollout.base.signatures import check_call
from rollout.base.temporary_folders import numbered_folder
from rollout.base.text import valid_text
from rollout.base.urls import without_proxy
from rollout.environments.protocol import Env, ToolCall
from rollout.records.trajectory import Task
from rollout.sandbox.guest.filters import can_confine, confine_program
from rollout.sandbox.tiers import readable_paths
from rollout.teams.source_checks import describe_misuse
from rollout.teams.team import TeamSession

_MAX_OUTPUT_BYTES = 1 << 20
_MAX_ERROR_CHARS = 2000
_MAX_VARIABLE_CHARS = 100_000  # Linux allows 128 KiB for an environment variable
# Variables from which clients read their base URL, beside the one of the vendor's SDK. A client
# that finds none calls the vendor's server with the session's key.
_OPENAI_URL_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL")
_ANTHROPIC_URL_VARIABLES = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL")
# Variables with the folder in which a framework keeps replies or memories. A reply from there would
# be that of another trajectory.
_CACHE_VARIABLES = ("DSPY_CACHEDIR", "CREWAI_STORAGE_DIR", "MEM0_DIR")
CRASH_EVENT = "program"  # tool name of the event that records a crash
# files in /etc that a confined command needs for HTTP
_NETWORK_FILES = ("ssl", "hosts", "mime.types", "nsswitch.conf", "passwd", "resolv.conf")


class ProgramFailed(RuntimeError):
    """Failure of an agent program itself, rather than of its session; there is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task for an agent program, and the addresses of its models."""

    task: Task
    problem: str  # as the environment states it
    openai_url: str  # base URL for OpenAI's clients
    anthropic_url: str  # base URL for Anthropic's clients
    key: str  # API key for both

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a command: those that clients of an API read, TASK and TASK_ID.

        TASK is the problem, or "" if it is too long for a variable or has a null character.
        """
        variables = dict.fromkeys(_OPENAI_URL_VARIABLES, self.openai_url)
        variables["OPENAI_HOST"] = self.openai_url.removesuffix("/v1")
        variables["OPENAI_API_KEY"] = self.key
        variables |= dict.fromkeys(_ANTHROPIC_URL_VARIABLES, self.anthropic_url)
        variables["ANTHROPIC_HOST"] = self.anthropic_url
        variables["ANTHROPIC_API_KEY"] = self.key
        fits_variable = len(self.problem) < _MAX_VARIABLE_CHARS and "\0" not in self.problem
        variables["TASK"] = self.problem if fits_variable else ""
        variables["TASK_ID"] = self.task.id
        return variables


_Program = Callable[[Job], Awaitable[str]]
_REGISTERED: Mapping[str, _Program] = {}  # programs are found by import path alone


def check_program(
    team: Collection[str],
    *,
    call: str | None = None,
    command: Sequence[str] | None = None,
    models: Mapping[str, str] | None = None,
    sandbox: Sequence[str] | None = None,
    **others: object,
) -> None:
    """Refuse options of `program` with which no trajectory can be played.

    Args:
        team: names of the agents.
        call, command, models, sandbox: options of `program`.
        others: other options, which are not checked.

    Raises:
        ValueError: not exactly one of `call` and `command` is given; `call` is not an importable
            async function of a `Job`, or reads an attribute that `Job` lacks; `models` names an
            agent who is not in the team; or the command cannot be confined as `sandbox` states.
    """
    if (call is None) == (command is None):
        raise ValueError(
            "orchestra 'program' needs either call, the import path of a function, or command"
        )
    if call is not None:
        function = lookup("agent program", call, _REGISTERED)
        check_call(f"agent program '{call}'", function, ("job",), coroutine=True, keywords=())
        misuse = describe_misuse(function, Job)
        if misuse:
            raise ValueError(f"agent program '{call}': {misuse}")
    for model, agent in (models or {}).items():
        if agent not in team:
            raise ValueError(
                f"models: '{model}' is agent '{agent}', who is not in the team; "
                f"agents: {', '.join(team)}"
            )
    if sandbox is not None:
        _check_sandbox(sandbox, has_command=command is not None)


def _check_sandbox(readable: Sequence[str], *, has_command: bool) -> None:
    """Raise ValueError if a command cannot be confined to these paths."""
    if not has_command:
        raise ValueError("sandbox: only a command can be confined; a function runs in this process")
    for path in readable:
        if not Path(path).exists():
            raise ValueError(f"sandbox: the path '{path}' does not exist")
    if not can_confine():
        raise ValueError(
            "sandbox: confining a command that calls models needs Linux 6.12 or later on x86_64"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRules:
    """Limits of an agent program, and the meaning of its failure.

    Args:
        deadline_s: seconds that the program may take.
        most_calls: maximum number of calls of models in a trajectory.
        at_once: maximum number of commands that run at the same time.
        crash: meaning of a program that fails after one of its calls was answered. `wrong`: its
            answer is "", since the reply may have caused the failure. `fail`: the trajectory fails
            and is quarantined, as it always is before the first answered call.
    """

    deadline_s: PositiveFloat = 600.0
    most_calls: PositiveInt = 256
    at_once: PositiveInt = 64
    crash: Literal["fail", "wrong"] = "wrong"


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
    """Run an agent program, which calls the team's agents as models of an API, on one task.

    The program needs no knowledge of this project. The environment is stepped once, with the text
    that the program answers.

    Args:
        call: import path of an async function that takes a `Job` and returns the answer.
        command: program and arguments, run without a shell. The problem is on standard input and in
            TASK, the gateway's addresses are in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the other
            variables that clients read, and the answer is the standard output.
        models: agent by the model name that the program uses; `*` stands for any other name.
        sandbox: files and folders that a command may read, besides those of the system and of this
            Python. It may then write only in a temporary folder, and connect only to the gateway.
            null: the command is not confined.
        rules: limits of the program, and the meaning of its failure.

    Raises:
        ValueError: the options are not valid; see `check_program`.
        ProgramFailed: the program failed before its first answered call, or `rules.crash` is
            `fail`.
        PromptTooLong: in place of ProgramFailed or Unasked, if a prompt of the program left no room
            for a reply.
        Unasked: the program ended, and no trained agent was asked.
        LateTool: the program took longer than its deadline.
    """
    # imported here because only this orchestra needs a web server
    from rollout.gateway.app import shared_gateway
    from rollout.gateway.sessions import GatewaySession

    check_program(
        [agent.name for agent in team.agents],
        call=call,
        command=command,
        models=models,
        sandbox=sandbox,
    )
    problem = valid_text(env.reset(task))
    # HTTP clients in this process and in commands must not send local requests to a proxy.
    os.environ.update(without_proxy("127.0.0.1", "localhost"))

    async with shared_gateway() as gateway:
        session = GatewaySession(team, aliases=models or {}, max_turns=rules.most_calls)
        async with gateway.serve_session(session) as (url, key):
            job = Job(
                task=task, problem=problem, openai_url=f"{url}/v1", anthropic_url=url, key=key
            )
            if command is not None:
                work = _run_command(tuple(command), job, sandbox=sandbox, rules=rules)
            else:
                function = lookup("agent program", str(call), _REGISTERED)
                work = with_deadline(rules.deadline_s, _call_function(function, job), _late_error)
            try:
                answer = await _result_unless_failed(work, session.failure)
            except ProgramFailed as error:
                if rules.crash == "fail" or team.last_turn is None:
                    # A prompt that left no room for a reply is the likelier cause of the failure.
                    raise (session.overlong or error) from error.__cause__
                answer = ""
                await _record_crash(team, error)
    if not team.has_trainable_turn:
        raise session.overlong or Unasked(
            _unasked_error(session.refused_calls, session.last_refusal)
        )
    await env.step(answer)


async def _record_crash(team: TeamSession, error: ProgramFailed) -> None:
    """Record the failure of a program after an answered call, as an event and a score of its turn."""
    turn = team.last_turn
    assert turn is not None
    team.score(turn.index, crashed=1.0)

    async def failed_run() -> ToolCall:
        return ToolCall(tool=CRASH_EVENT, query="", result=str(error), failed=True)

    await team.run_tool(CRASH_EVENT, failed_run, turn.index)


def _unasked_error(refused_calls: int, last_refusal: str) -> str:
    """Return the error of a trajectory in which no trained agent was asked.

    Args:
        refused_calls: number of calls that the gateway refused.
        last_refusal: error of the latest of them.
    """
    if refused_calls:
        return (
            f"program: no trained agent was asked; calls that the gateway refused: {refused_calls}, "
            f"the last with: {last_refusal}"
        )
    return (
        "program: no trained agent was asked. Either the client answered from a cache of replies "
        "(turn it off, as DSPy's with cache=False), or it has another base URL than the gateway's "
        "(OPENAI_BASE_URL, ANTHROPIC_BASE_URL or the job's), or the program made no call; see "
        "docs/gateway.md"
    )


async def _result_unless_failed(work: Awaitable[str], failure: asyncio.Future[Exception]) -> str:
    """Return the result of `work`; if `failure` comes first, raise that failure and cancel the work."""
    task = asyncio.ensure_future(work)
    try:
        awaited: set[asyncio.Future[Any]] = {task, failure}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return task.result()
    finally:
        await cancel_tasks([task])


def _late_error(message: str) -> LateTool:
    return LateTool(f"program: {message}", "tool/program")


async def _call_function(function: _Program, job: Job) -> str:
    """Return the answer of a function; raise ProgramFailed for any error, including SystemExit."""
    try:
        answer = await function(job)
    # CancelledError is caught because the function may raise it itself. To catch a cancellation by `with_deadline`
    # does no harm, because `with_deadline` drops the error of a call that it has cancelled.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise ProgramFailed(f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]) from error
    if not isinstance(answer, str):
        raise ProgramFailed(
            f"the agent program returned a value of type {type(answer).__name__}; expected a text"
        )
    return answer


async def _run_command(
    command: Sequence[str], job: Job, *, sandbox: Sequence[str] | None, rules: ProgramRules
) -> str:
    """Run a command, once fewer than `rules.at_once` commands run; return its standard output."""
    slots = per_loop(("agent programs", rules.at_once), partial(asyncio.Semaphore, rules.at_once))
    environment = {**os.environ, **job.environment}
    run = partial(run_command, command, job.problem.encode(), max_output_bytes=_MAX_OUTPUT_BYTES)
    try:
        async with slots:
            with numbered_folder("agent-program") as numbered:
                folder = str(numbered)
                for name in _CACHE_VARIABLES:
                    environment[name] = f"{folder}/{name.lower()}"
                if sandbox is not None:
                    environment |= {"HOME": folder, "TMPDIR": folder}
                    run = partial(run, confine=_confinement(sandbox, folder, job.openai_url))
                completed = await with_deadline(rules.deadline_s, run(env=environment), _late_error)
    except (OSError, ValueError, SubprocessError) as error:
        raise ProgramFailed(f"'{command[0]}': {error}") from error

    if completed.returncode:
        stderr = _text_without_key(completed.stderr, job.key)[-_MAX_ERROR_CHARS:]
        raise ProgramFailed(
            f"'{command[0]}' ended with status {completed.returncode}: "
            f"{stderr or 'its standard error is empty'}"
        )
    return _text_without_key(completed.stdout, job.key)


def _text_without_key(output: bytes, key: str) -> str:
    """Return the output of a command as text, with its API key hidden."""
    return output.decode("utf-8", "replace").replace(key, "[key]").strip()


def _confinement(readable: Sequence[str], folder: str, gateway_url: str) -> Callable[[], None]:
    """Return the function with which a new process confines itself.

    Args:
        readable: paths that the process may read, besides those of the system and of this Python.
        folder: folder in which it may write.
        gateway_url: URL whose port it may connect to.
    """
    paths = [*readable_paths(), sys.prefix]
    paths += [f"/etc/{name}" for name in _NETWORK_FILES]
    paths += [str(Path(path).absolute()) for path in readable]
    port = urlsplit(gateway_url).port or 0
    return partial(confine_program, readable=paths, writable=[folder], port=port)
