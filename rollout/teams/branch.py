"""One of several instances of an orchestra: it repeats a line from recorded replies, and goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout.base.errors import EngineError
from rollout.base.task_group import stop, together
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.team import Call, Team, TeamSession, TurnReply

_SETTLE = 8  # turns of the event loop in which nested gathers start their calls and hand results on

Key = tuple[int, str, str]  # turn, agent, state key: what a call asks for


class BranchError(RuntimeError):
    """A branch that was told the same as another did something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call of an earlier round and how it was answered."""

    call: Call
    answer: TurnReply | EngineError


class BranchSeat(TeamSession):
    """A seat whose calls stand open until the tree answers them."""

    def __init__(self, team: Team, place: tuple[int | str, ...]) -> None:
        super().__init__(team, place)
        self.open: dict[int, tuple[Call, asyncio.Future[TurnReply]]] = {}  # by turn
        self.stirred = asyncio.Event()  # a call was made, or something that was waited for has come
        self.tasks: set[asyncio.Task[Any] | None] = set()  # that ever called

    @contextmanager
    def waits(self, what: object) -> Iterator[None]:
        self.tasks.add(asyncio.current_task())
        try:
            with super().waits(what):
                yield
        finally:
            self.stirred.set()

    def place(self, turn: int, /, node: str) -> None:
        """Refuse: the turns of this seat have their nodes already.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"turn {turn} cannot be node {node}: the orchestra grows its own tree; set no branching")

    async def _answer(self, call: Call) -> TurnReply:
        future: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self.open[call.index] = call, future
        self.stirred.set()
        try:
            return await future
        finally:
            self.open.pop(call.index, None)

    async def ask(self, call: Call, node: str) -> TurnReply | EngineError:
        try:
            return await self._ask(call, node)
        except EngineError as failure:
            return failure


class Branch:
    """An instance of the orchestra that is played a round at a time.

    A round is the calls that stand open when the orchestra can go on by replies only. They are asked for side by side,
    and their replies are handed over together, in the order of the calls.
    """

    def __init__(
        self, task: Task, seat: BranchSeat, env: Env, orchestra: Orchestra, *, tool_s: float | None = None
    ) -> None:
        self.line = Episode(task, seat, env, orchestra, tool_s=tool_s)
        self.node = ""
        self.rounds: list[list[Asked]] = []
        self.resting = False
        self._seat = seat
        self._before = 0  # steps of the environment before the latest round
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the orchestra has ended."""
        return self._task is not None and self._task.done()

    @property
    def standing(self) -> list[Key]:
        """What every open call asks for."""
        return [_key(call) for call, _ in self._seat.open.values()]

    async def rest(self) -> None:
        """Until the orchestra has ended, or waits for open calls and nothing else. A bug of the orchestra is raised."""
        seat = self._seat
        if self._task is None:
            self._task = asyncio.create_task(self.line.play())
            self._task.add_done_callback(lambda _: seat.stirred.set())
        while not self._task.done():
            seat.stirred.clear()
            # whoever waits in the seat waits for an open call: no step is under way, every reply was taken
            if seat.open and len(seat.open) == len(seat.waiting):
                for _ in range(1 if seat.tasks == {self._task} else _SETTLE):
                    await asyncio.sleep(0)
                if not seat.stirred.is_set():
                    break
            else:
                await seat.stirred.wait()
        self.resting = True
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """End the orchestra where it stands."""
        if self._task is not None:
            await stop([self._task])

    async def follow(self, rounds: Sequence[list[Asked]], standing: Sequence[Key]) -> None:
        """Repeat `rounds` without an engine, up to where the calls `standing` are open.

        Raises:
            BranchError: the orchestra asks for other turns than it did.
        """
        await self.rest()
        for asked in rounds:
            self._expect([_key(one.call) for one in asked])
            await self._hand_over(asked)
        self._expect(standing)

    async def grow(self, node: str) -> None:
        """Play the round that stands open, as branch `node`."""
        self.node, self.resting = node, False
        calls = [call for call, _ in self._seat.open.values()]
        answers = await together(self._seat.ask(call, node) for call in calls)
        await self._hand_over([Asked(call=call, answer=answer) for call, answer in zip(calls, answers, strict=True)])

    def score(self, alpha: float) -> float:
        """Of the latest round: the local scores of its turns and, once, alpha times what the environment gave."""
        local = sum(self._seat.scores.get(one.call.index, {}).get("local", 0.0) for one in self.rounds[-1])
        return local + alpha * sum(self.line.rewards[self._before :])

    def _expect(self, calls: Sequence[Key]) -> None:
        if self.standing != calls and self.line.failure is None:
            raise BranchError(f"told the same again, it waits for {_names(self.standing)} instead of {_names(calls)}")

    async def _hand_over(self, asked: list[Asked]) -> None:
        self.rounds.append(asked)
        self.resting, self._before = False, len(self.line.rewards)
        for one in asked:
            _, future = self._seat.open.get(one.call.index, (None, None))
            if future is None:
                continue  # the orchestra has given the call up
            if isinstance(one.answer, EngineError):
                future.set_exception(one.answer)
            else:
                future.set_result(one.answer)
        await self.rest()


def _key(call: Call) -> Key:
    return call.index, call.agent.name, call.state_key


def _names(calls: Sequence[Key]) -> str:
    return ", ".join(f"{agent} (turn {turn}, state {state})" for turn, agent, state in calls) or "nobody"
