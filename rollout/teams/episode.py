"""Episode: one play of an orchestra on a task, with its steps, tool calls, rewards, and why it failed."""

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import TypeVar, cast

from rollout.base.deadlines import Late, LateTool, with_deadline
from rollout.base.errors import Defect, EngineError, EnvError
from rollout.base.watchdog import Wait
from rollout.environments.protocol import Case, Env, Living, PlayedEnv, Step, ToolCall
from rollout.environments.tools import Tool
from rollout.records.trajectory import Task, ToolEvent, Turn
from rollout.teams.team import Blamed, Call, RecordedReply, TeamSession

Orchestra = Callable[[Task, TeamSession, Env], Awaitable[None]]
_T = TypeVar("_T")


class Episode:
    """A task played once, from its start to its end.

    It stands in for the environment, to write down the steps.
    """

    def __init__(
        self,
        task: Task,
        seat: TeamSession,
        make_env: Callable[[Task], Env],
        orchestra: Orchestra,
        tool_s: float | None = None,
        name: str = "",
    ) -> None:
        """A call of the environment may take `tool_s` seconds; errors have its `name`, by default that in the task."""
        self.seat = seat
        self.rewards: list[float] = []  # of every step
        self.answer: str | None = None  # as the latest step that reported one left it
        self.metrics: dict[str, float] = {}  # each as the latest step left it
        self.error = ""  # why it failed
        self.failure: EngineError | EnvError | None = None  # who is to blame, if anybody raised
        self._events: list[ToolEvent] = []
        self._task = task
        self._make_env, self._name = make_env, name or task.env
        self._orchestra = orchestra
        self._tool_s = tool_s

    async def play(self) -> None:
        """Run the orchestra. What it, an engine or the environment raises becomes `error`."""
        living, opened = AsyncExitStack(), AsyncExitStack()
        try:
            with Blamed(f"{self._name}.open"):
                self._env = self._make_env(self._task)
            if hasattr(env := cast(Living, self._env), "open") and hasattr(env, "close"):
                living.push_async_callback(env.close)
                opening: Callable[..., Awaitable[None]] = env.open
                await self._use("open", partial(opening, **self._supplied(opening)), self._task)
            await self._open_tools(opened)
            with Blamed("orchestra"):
                await self._orchestra(self._task, self.seat, self)
            if self.outcome is None:
                self.error = "the orchestra ended without a step in the environment"
        except (EngineError, EnvError) as failure:
            self._fail(failure)
        finally:
            try:
                await self.seat.close()
            finally:
                await self._let_go("tools", opened.aclose)
                await self._let_go(f"{self._name}.close", living.aclose)

    async def _open_tools(self, opened: AsyncExitStack) -> None:
        """Open every agent's tools, each with this episode as its environment where it takes one."""
        for agent in self.seat.agents:
            own: list[Tool] = []
            for name, maker in agent.tools.items():
                own += await self._timed(
                    f"tools.{name}", opened.enter_async_context, maker(**self._supplied(maker))
                )
            if own:
                self.seat.tools[agent.name] = own
        self.seat.run_tool = self.run_tool

    def _supplied(self, function: Callable[..., object]) -> dict[str, object]:
        """Return those of this episode's parts that a function has parameters for."""
        parts = {"env": self, "calls": self.seat.calls}
        parameters = inspect.signature(function).parameters
        return {name: part for name, part in parts.items() if name in parameters}

    async def run_tool(
        self, name: str, call: Callable[[], Awaitable[ToolCall]], turn: int
    ) -> ToolCall:
        """Make a tool call of a turn (see `ToolRunner`): timed, Blamed on its tool, and written down."""
        began = time.time()
        with self.seat.waits(f"tools.{name}"):
            made = await self._timed(f"tools.{name}", call)
        self._note(made, self.seat.turn(turn), began)
        return made

    def _fail(self, failure: EngineError | EnvError) -> None:
        self.failure, self.error = failure, f"{type(failure).__name__}: {failure}"

    async def _let_go(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._timed(what, close)
        except EnvError as failure:
            if not self.error:
                self._fail(failure)

    def reset(self, task: Task) -> str:
        with Blamed(f"{self._name}.reset"):
            problem = self._env.reset(task)
        self._stand()
        return problem

    async def step(self, action: str) -> Step:
        began = time.time()
        step = await self._use("step", self._env.step, action)
        if not math.isfinite(step.reward):
            raise Defect(f"{self._name}.step: its reward is {step.reward}")
        self._stand()
        self.seat.credit(step.reward, step.metrics)
        self.rewards.append(step.reward)
        self.answer = self.answer if step.answer is None else step.answer
        self.metrics.update(step.metrics)
        for call in step.tools:
            self._note(call, self.seat.last, began)
        return step

    def _stand(self) -> None:
        """Tell the session in which state, without history, the coming turns are, where the environment names it."""
        if (state := getattr(self._env, "state", None)) is not None:
            with Blamed(f"{self._name}.state"):
                self.seat.state = state()

    async def preview(self, action: str) -> Step:
        return await self._able(PlayedEnv.preview, "preview an action", action)

    async def same(self, answer: str, other: str) -> bool:
        return await self._able(PlayedEnv.same, "compare two answers", answer, other)

    async def run(self, program: str) -> ToolCall:
        began = time.time()
        call = await self._able(PlayedEnv.run, "run a program", program)
        self._note(call, self.seat.own, began)
        return call

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        began = time.time()
        step = await self._able(PlayedEnv.check, "run an agent's tests", program, cases)
        for call in step.tools:
            self._note(call, self.seat.own, began)
        return step

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        return await self._able(PlayedEnv.agreement, "judge an agent's tests", cases)

    async def files(self) -> Mapping[str, int]:
        began = time.time()
        files = await self._able(PlayedEnv.files, "keep files")
        self._note(ToolCall(tool="files", query="", result="\n".join(files)), self.seat.own, began)
        return files

    async def forget(self) -> None:
        await self._able(PlayedEnv.forget, "keep files")

    async def _able(
        self, method: Callable[..., Awaitable[_T]], ability: str, *arguments: object
    ) -> _T:
        """What the environment's own `method` of an optional protocol gives."""
        call = getattr(self._env, method.__name__, None)
        if call is None:
            raise EnvError(
                f"{type(self._env).__name__} cannot {ability}; use a team that does not ask for it"
            )
        return await self._use(method.__name__, call, *arguments)

    async def _use(self, method: str, call: Callable[..., Awaitable[_T]], *arguments: object) -> _T:
        with self.seat.waits(tool := f"{self._name}.{method}"):
            return await self._timed(tool, call, *arguments)

    async def _timed(self, tool: str, call: Callable[..., Awaitable[_T]], *arguments: object) -> _T:
        async def called() -> _T:
            with Blamed(tool):
                return await call(*arguments)

        try:
            return await with_deadline(self._tool_s, called())
        except Late as late:
            raise LateTool(f"{tool}: {late}", f"tool/{tool}") from None

    def _note(self, call: ToolCall, turn: Turn | None, began: float) -> None:
        index, node = (turn.index, turn.node) if turn else (-1, "")
        took_s = time.time() - began
        self._events.append(
            ToolEvent(after_turn=index, node=node, **asdict(call), started_s=began, took_s=took_s)
        )

    @property
    def tools(self) -> list[ToolEvent]:
        """The calls of tools so far, in the order in which they began."""
        return sorted(self._events, key=attrgetter("started_s"))

    @property
    def leaf(self) -> str:
        """Where a tree of the orchestra's own ended, "" without one."""
        return self.seat.leaf

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return self.seat.turns

    @property
    def replies(self) -> Mapping[int, RecordedReply]:
        """Replies of the policies so far, by the seed of the call."""
        return self.seat.replies

    @property
    def outcome(self) -> float | None:
        """The sum of the rewards, None before the first step."""
        return sum(self.rewards, 0.0) if self.rewards else None

    @property
    def waiting(self) -> str:
        """Whom or what the orchestra waits for."""
        return ", ".join(str(what) for what, _ in self.seat.waiting.values()) or "the orchestra"

    def waits(self) -> list[Wait]:
        """What its tasks wait for, for a watchdog."""
        last = self.seat.last
        after = f" after turn {last.index} of {last.agent}" if last else ""
        return [
            Wait(
                what=f"{what} waits for policy {what.agent.policy}"
                if isinstance(what, Call)
                else f"{what}{after}",
                since=since,
            )
            for what, since in self.seat.waiting.values()
        ]
