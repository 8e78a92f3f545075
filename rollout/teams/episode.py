"""Episode: one play of an orchestra on a task, with its steps, tool calls, rewards and error."""

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from rollout.base.deadlines import Late, LateTool, with_deadline
from rollout.base.errors import Defect, EngineError, EnvError
from rollout.base.numbers import real_number
from rollout.base.watchdog import Wait
from rollout.environments.protocol import (
    Case,
    Decision,
    Env,
    PlayedEnv,
    Step,
    ToolCall,
    is_resource_env,
)
from rollout.environments.tools import Tool
from rollout.records.trajectory import Task, ToolEvent, Turn
from rollout.teams.defects import DefectGuard
from rollout.teams.team import Call, RecordedReply, TeamSession

# Control flow of a team: an async function that calls agents and steps the environment.
Orchestra = Callable[[Task, TeamSession, Env], Awaitable[None]]
_T = TypeVar("_T")


class Episode:
    """One play of an orchestra on a task.

    The orchestra gets the episode as its environment. The episode passes every call on to the
    environment, and records rewards, answers, metrics and tool calls, but not those of previews.
    Calls that are awaited have a deadline.
    """

    def __init__(
        self,
        task: Task,
        session: TeamSession,
        make_env: Callable[[Task], Env],
        orchestra: Orchestra,
        tool_s: float | None = None,
        name: str = "",
    ) -> None:
        """Prepare an episode.

        Args:
            tool_s: deadline of one call of the environment or a tool, in seconds; None: no deadline.
            name: name of the environment in errors and `late/...` metrics; "": `task.env`.
        """
        self.session = session
        self.rewards: list[float] = []  # rewards of all steps
        self.answer: str | None = None  # answer of the latest step that has one
        self.metrics: dict[str, float] = {}  # latest value of each metric of the steps
        self.error = ""  # why the episode failed
        self.failure: EngineError | EnvError | None = None  # exception behind `error`, if any
        self._events: list[ToolEvent] = []
        self._task = task
        self._make_env = make_env
        self._name = name or task.env
        self._orchestra = orchestra
        self._tool_s = tool_s

    async def play(self) -> None:
        """Open the environment and the tools, run the orchestra, and close what was opened.

        An EngineError or EnvError fails the episode: it is stored in `failure`, and its text in `error`.
        """
        opened_env = AsyncExitStack()
        opened_tools = AsyncExitStack()
        try:
            with DefectGuard(f"{self._name}.open"):
                self._env = self._make_env(self._task)
            await self._open_env(opened_env)
            await self._open_tools(opened_tools)
            with DefectGuard("orchestra"):
                await self._orchestra(self._task, self.session, self)
            if self.outcome is None:
                self.error = "the orchestra ended without a step in the environment"
        except (EngineError, EnvError) as failure:
            self._fail(failure)
        finally:
            try:
                await self.session.close()
            finally:
                try:
                    await self._close("tools", opened_tools.aclose)
                finally:
                    await self._close(f"{self._name}.close", opened_env.aclose)

    async def _open_env(self, opened: AsyncExitStack) -> None:
        """Open the environment if it has `open` and `close`."""
        env = self._env
        if is_resource_env(env):
            opened.push_async_callback(env.close)  # is called even if `open` fails
            open_env: Callable[..., Awaitable[None]] = env.open
            arguments = self._accepted_arguments(open_env)
            await self._call_env("open", partial(open_env, **arguments), self._task)

    async def _open_tools(self, opened: AsyncExitStack) -> None:
        """Open every agent's tools, and have the session make tool calls with `run_tool`."""
        for agent in self.session.agents:
            tools: list[Tool] = []
            for name, maker in agent.tools.items():
                with DefectGuard(f"tools.{name}"):
                    tools_context = maker(**self._accepted_arguments(maker))
                with self.session.waits_for(f"tools.{name}"):
                    tools += await self._timed(
                        f"tools.{name}", opened.enter_async_context, tools_context
                    )
            if tools:
                self.session.tools[agent.name] = tools
        self.session.run_tool = self.run_tool

    def _accepted_arguments(self, function: Callable[..., object]) -> dict[str, object]:
        """Return the arguments `env` (this episode) and `calls`, if the function has parameters for them."""
        arguments = {"env": self, "calls": self.session.call_record}
        parameters = inspect.signature(function).parameters
        return {name: value for name, value in arguments.items() if name in parameters}

    async def run_tool(
        self, name: str, call: Callable[[], Awaitable[ToolCall]], turn: int
    ) -> ToolCall:
        """Make a tool call of a turn within the deadline `tool_s`, and record it."""
        started_s = time.time()
        with self.session.waits_for(f"tools.{name}"):
            tool_call = await self._timed(f"tools.{name}", call)
        self._record(tool_call, self.session.turn(turn), started_s)
        return tool_call

    def _fail(self, failure: EngineError | EnvError) -> None:
        self.failure = failure
        self.error = f"{type(failure).__name__}: {failure}"

    async def _close(self, call_name: str, close: Callable[[], Awaitable[None]]) -> None:
        """Close the tools or the environment; an error fails the episode, unless it has failed already."""
        try:
            await self._timed(call_name, close)
        except (EngineError, EnvError) as failure:
            if not self.error:
                self._fail(failure)

    def reset(self, task: Task) -> str:
        with DefectGuard(f"{self._name}.reset"):
            problem = self._env.reset(task)
        self._update_state()
        return problem

    async def step(self, action: str) -> Step:
        """Step the environment; record its reward, answer, metrics and tool calls."""
        started_s = time.time()
        step = self._with_plain_values(await self._call_env("step", self._env.step, action))
        self._update_state()
        self.session.credit_step(step.reward, step.metrics)
        self.rewards.append(step.reward)
        if step.answer is not None:
            self.answer = step.answer
        self.metrics.update(step.metrics)
        # The whole team takes a step, so its tool calls are recorded after the team's latest turn, no
        # matter which asyncio task asked for that turn.
        for tool_call in step.tools:
            self._record(tool_call, self.session.last_turn, started_s)
        return step

    def _with_plain_values(self, step: Step) -> Step:
        """Return a step with plain Python numbers; raise Defect if a value cannot be recorded."""
        owner = f"{self._name}.step"
        try:
            reward = real_number(step.reward, f"{owner}: its reward")
            metrics = {
                name: real_number(value, f"{owner}: its metric '{name}'")
                for name, value in step.metrics.items()
            }
        except TypeError as error:
            raise Defect(str(error)) from None
        if not math.isfinite(reward):
            raise Defect(f"{owner}: its reward is {reward}; expected a finite number")
        if step.answer is not None and not isinstance(step.answer, str):
            raise Defect(f"{owner}: its answer is {step.answer!r}; expected text, or None")
        return replace(step, reward=reward, metrics=metrics)

    def _update_state(self) -> None:
        """Store the environment's state in the session, if the environment has a method `state`."""
        get_state = getattr(self._env, "state", None)  # see StatefulEnv
        if get_state is not None:
            with DefectGuard(f"{self._name}.state"):
                self.session.state = get_state()

    async def preview(self, action: str) -> Step:
        return await self._call_optional(PlayedEnv.preview, "preview an action", action)

    async def same(self, answer: str, other: str) -> bool:
        return await self._call_optional(PlayedEnv.same, "compare two answers", answer, other)

    async def run(self, program: str) -> ToolCall:
        started_s = time.time()
        tool_call = await self._call_optional(PlayedEnv.run, "run a program", program)
        self._record(tool_call, self.session.current_task_turn, started_s)
        return tool_call

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        started_s = time.time()
        step = await self._call_optional(PlayedEnv.check, "run an agent's tests", program, cases)
        for tool_call in step.tools:
            self._record(tool_call, self.session.current_task_turn, started_s)
        return step

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        return await self._call_optional(PlayedEnv.agreement, "judge an agent's tests", cases)

    async def decision(self) -> Decision:
        return await self._call_optional(PlayedEnv.decision, "name the player whose turn it is")

    async def files(self) -> Mapping[str, int]:
        started_s = time.time()
        files = await self._call_optional(PlayedEnv.files, "keep files")
        listing = ToolCall(tool="files", query="", result="\n".join(files))
        self._record(listing, self.session.current_task_turn, started_s)
        return files

    async def forget(self) -> None:
        await self._call_optional(PlayedEnv.forget, "keep files")

    async def _call_optional(
        self, method: Callable[..., Awaitable[_T]], ability: str, *arguments: object
    ) -> _T:
        """Call a method that an environment need not have; raise EnvError if this one lacks it.

        Args:
            method: the method in `PlayedEnv`.
            ability: what an environment with the method can do, for the error.
            arguments: arguments of the call.
        """
        call = getattr(self._env, method.__name__, None)
        if call is None:
            raise EnvError(
                f"environment '{self._name}' cannot {ability}; use a team that does not ask for it"
            )
        return await self._call_env(method.__name__, call, *arguments)

    async def _call_env(
        self, method: str, call: Callable[..., Awaitable[_T]], *arguments: object
    ) -> _T:
        """Call a method of the environment; the session records the wait for it."""
        call_name = f"{self._name}.{method}"
        with self.session.waits_for(call_name):
            return await self._timed(call_name, call, *arguments)

    async def _timed(
        self, call_name: str, call: Callable[..., Awaitable[_T]], *arguments: object
    ) -> _T:
        """Make a call within the deadline `tool_s`; a Defect or LateTool names the call."""

        async def guarded() -> _T:
            with DefectGuard(call_name):
                return await call(*arguments)

        try:
            return await with_deadline(self._tool_s, guarded())
        except Late as late:
            raise LateTool(f"{call_name}: {late}", f"tool/{call_name}") from None

    def _record(self, call: ToolCall, turn: Turn | None, started_s: float) -> None:
        """Record a tool call that has just returned, and the turn that it followed."""
        event = ToolEvent(
            after_turn=turn.index if turn else -1,
            node=turn.node if turn else "",
            **asdict(call),
            started_s=started_s,
            took_s=time.time() - started_s,
        )
        self._events.append(event)

    @property
    def tools(self) -> list[ToolEvent]:
        """The tool calls so far, in the order in which they began."""
        return sorted(self._events, key=attrgetter("started_s"))

    @property
    def leaf(self) -> str:
        """The node that the outcome comes from, in a tree that the orchestra grows; "" if there is none."""
        return self.session.leaf

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return self.session.turns

    @property
    def replies(self) -> Mapping[int, RecordedReply]:
        """The replies of the policies so far, by the seed of the call."""
        return self.session.replies

    @property
    def outcome(self) -> float | None:
        """The sum of the rewards, None before the first step."""
        return sum(self.rewards, 0.0) if self.rewards else None

    @property
    def waiting(self) -> str:
        """The calls that the orchestra waits for, as a text; "the orchestra" if it waits for none."""
        calls = [str(wait.awaited) for wait in self.session.innermost_waits]
        return ", ".join(calls) or "the orchestra"

    def waits(self) -> list[Wait]:
        """Return the calls that the episode waits for, for a watchdog."""
        last = self.session.last_turn
        after_turn = f" after turn {last.index} of {last.agent}" if last else ""
        waits = []
        for wait in self.session.innermost_waits:
            detail = after_turn
            if isinstance(wait.awaited, Call):
                detail = f" waits for policy {wait.awaited.agent.policy}"
            waits.append(Wait(description=f"{wait.awaited}{detail}", since=wait.since))
        return waits
