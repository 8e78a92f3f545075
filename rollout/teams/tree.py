"""Tree search (tree rollouts) inside any orchestra: branch, score, continue (AT-GRPO, Stronger-MAS, arXiv 2510.11062).

A running orchestra cannot be copied, so a branch is a second instance of it, with an environment of its own, that
repeats the turns so far from the recorded replies and then goes on by itself. That needs an orchestra and an
environment that do the same when told the same, and an orchestra that waits for nothing but its team and environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from rollout.base.async_tasks import cancel_tasks, gather_or_cancel, set_outcome
from rollout.base.deadlines import Late
from rollout.base.errors import EngineError, EnvError, Undecided
from rollout.base.section import Section
from rollout.base.watchdog import Wait
from rollout.environments.protocol import Env
from rollout.records.call_record import CallRecord
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task, ToolEvent, Turn
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.team import Call, RecordedReply, Team, TeamSession, TurnReply

_SETTLE = 8  # turns of the event loop in which nested gathers start their calls and hand results on

CallKey = tuple[int, str, str]  # turn, agent, state key: what a call asks for
Asked = tuple[
    Call, TurnReply | EngineError | EnvError
]  # a call of an earlier round and how it was answered


class Branching(Section):
    """Tree sampling: branches from every state, scored, of which one goes on (AT-GRPO)."""

    width: int = Field(ge=1)  # branches of every round; 1 plays what is played without a tree
    alpha: float = 1.0  # weight of the team's reward in a branch's score
    select: Literal["greedy", "sampled"] = (
        "greedy"  # the best branch goes on (the first of equals), or any
    )


@dataclass(eq=False)
class Tree:
    """A task played as a tree, from its start to the end of the branch that went on."""

    branching: Branching
    task: Task
    team: Team
    place: tuple[int | str, ...]
    make_env: Callable[[Task], Env]
    orchestra: Orchestra
    tool_s: float | None = None
    env: str = ""  # its name
    calls: CallRecord = field(default_factory=CallRecord)  # that must not be repeated

    def __post_init__(self) -> None:
        self.replies: dict[int, RecordedReply] = {}  # of all branches, by the seed of the call
        self.error = ""  # why it failed
        self._branches = [self._sprout()]  # that play; the first leads: its episode is the tree's
        self._scores: dict[str, float] = {}  # by node
        self._turns: list[Turn] = []  # of the branches that did not go on
        self._tools: list[ToolEvent] = []
        self._dropped: Counter[str] = (
            Counter()
        )  # branches that failed, by reason and by what was late

    def _sprout(self) -> Branch:
        seat = BranchSession(self.team, self.place, self.calls)
        seat.replies = self.replies
        return Branch(
            Episode(
                self.task, seat, self.make_env, self.orchestra, tool_s=self.tool_s, name=self.env
            ),
            seat,
        )

    async def play(self) -> None:
        """Grow the tree to its end. It fails when all branches of a round fail, or when it cannot branch."""
        try:
            await self._branches[0].rest()
            while not self._branches[0].ended:
                await self._round()
            self.error = self.episode.error
        except BranchError as failure:
            what = f"environment or orchestra of task {self.task.id} is not deterministic: cannot branch"
            self.error = f"BranchError: {what} ({failure})"
        finally:
            await gather_or_cancel(branch.close() for branch in self._branches)

    async def _round(self) -> None:
        lead = self._branches[0]
        parent, rounds, standing = lead.node, list(lead.rounds), lead.standing
        followers = [self._sprout() for _ in range(self.branching.width - 1)]
        self._branches = [lead, *followers]
        await gather_or_cancel(branch.follow(rounds, standing) for branch in followers)
        await gather_or_cancel(
            branch.grow(f"{parent}.{number}".lstrip("."))
            for number, branch in enumerate(self._branches)
            if not branch.episode.error
        )
        self._dropped.update(name for branch in self._branches for name in _reasons(branch.episode))
        grown = [branch for branch in self._branches if not branch.episode.error]
        self._scores |= {branch.node: branch.score(self.branching.alpha) for branch in grown}
        chosen = self._choose(grown, len(rounds)) if grown else lead
        others = [branch for branch in self._branches if branch is not chosen]
        self._branches = [chosen, *others]
        await gather_or_cancel(branch.close() for branch in others)
        self._branches = [chosen]
        for branch in others:
            if branch in grown:
                self._turns += [turn for turn in branch.episode.turns if turn.node == branch.node]
                self._tools += [
                    event for event in branch.episode.tools if event.node == branch.node
                ]

    def _choose(self, grown: Sequence[Branch], depth: int) -> Branch:
        if self.branching.select == "sampled":
            return grown[derive_seed(*self.place, "select", depth) % len(grown)]
        return max(grown, key=lambda branch: self._scores[branch.node])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every branch's turns, round by round; the score `branch` is that of the turn's round."""
        turns = sorted(
            [*self.episode.turns, *self._turns], key=lambda turn: (_order(turn.node), turn.index)
        )
        return tuple(
            replace(turn, scores={**turn.scores, "branch": self._scores[turn.node]})
            if turn.node in self._scores
            else turn
            for turn in turns
        )

    @property
    def tools(self) -> tuple[ToolEvent, ...]:
        """Every branch's tool calls, round by round."""
        return tuple(
            sorted([*self.episode.tools, *self._tools], key=lambda event: _order(event.node))
        )

    @property
    def leaf(self) -> str:
        """The node of the branch that went on."""
        return self._branches[0].node

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the episode that went on, and how many branches failed, by reason.

        Names: `dropped_branches/<reason>`, and of those `late/<what>` and `undecided`.
        """
        return self.episode.metrics | {why: float(n) for why, n in self._dropped.items()}

    @property
    def episode(self) -> Episode:
        """The one that went on."""
        return self._branches[0].episode

    @property
    def waiting(self) -> str:
        """Whom or what the branches wait for."""
        waiting = (branch.episode.waiting for branch in self._branches if not branch.resting)
        return ", ".join(dict.fromkeys(waiting)) or "the orchestra"

    def waits(self) -> list[Wait]:
        """What its branches wait for, for a watchdog."""
        return [
            wait
            for branch in self._branches
            if not branch.resting
            for wait in branch.episode.waits()
        ]


class BranchError(RuntimeError):
    """A branch that was told the same as another did something else."""


class BranchSession(TeamSession):
    """A session whose calls stand open until the tree answers them."""

    def __init__(self, team: Team, place: tuple[int | str, ...], calls: CallRecord) -> None:
        # branches may make equal calls and get other results: their latest turns tell them apart
        branch_calls = calls.for_branch(lambda: str(self.last.seed) if self.last else "")
        super().__init__(team, place, branch_calls)
        self.open: dict[int, tuple[Call, asyncio.Future[TurnReply]]] = {}  # by turn
        self.stirred = asyncio.Event()  # a call was made, or something that was waited for has come
        self.tasks: set[asyncio.Task[Any] | None] = set()  # that ever called

    @contextmanager
    def waits(self, what: object) -> Iterator[asyncio.Task[Any]]:
        self.tasks.add(asyncio.current_task())
        try:
            with super().waits(what) as task:
                yield task
        finally:
            self.stirred.set()

    def place(self, turn: int, /, node: str) -> None:
        """Refuse: the turns of this session have their nodes already."""
        raise ValueError(
            f"turn {turn} cannot be node {node}: the orchestra grows its own tree; set no branching"
        )

    async def _ask(self, call: Call, node: str = "") -> TurnReply:
        future: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self.open[call.index] = call, future
        self.stirred.set()
        try:
            return await future
        finally:
            self.open.pop(call.index, None)

    async def ask(self, call: Call, node: str) -> TurnReply | EngineError | EnvError:
        try:
            return await super()._ask(call, node)
        except (EngineError, EnvError) as failure:
            return failure


class Branch:
    """An instance of the orchestra that is played a round at a time.

    A round is the calls that stand open when the orchestra can go on by replies only. They are asked for side by side,
    and their replies are handed over together, in the order of the calls.
    """

    def __init__(self, episode: Episode, seat: BranchSession) -> None:
        self.episode, self._seat = episode, seat
        self.node = ""
        self.rounds: list[list[Asked]] = []
        self.resting = False
        self._before = 0  # steps of the environment before the latest round
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the orchestra has ended."""
        return self._task is not None and self._task.done()

    @property
    def standing(self) -> list[CallKey]:
        """What every open call asks for."""
        return [_key(call) for call, _ in self._seat.open.values()]

    async def rest(self) -> None:
        """Until the orchestra has ended, or waits for open calls and nothing else."""
        seat = self._seat
        if self._task is None:
            self._task = asyncio.create_task(self.episode.play())
            self._task.add_done_callback(lambda _: seat.stirred.set())
        while not self._task.done():
            seat.stirred.clear()
            # whoever waits in the session waits for an open call: no step is under way, every reply was taken
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
            await cancel_tasks([self._task])

    async def follow(self, rounds: Sequence[list[Asked]], standing: Sequence[CallKey]) -> None:
        """Repeat `rounds` without an engine, up to where the calls `standing` are open.

        Raises:
            BranchError: the orchestra asks for other turns than it did.
        """
        await self.rest()
        for asked in rounds:
            self._expect([_key(call) for call, _ in asked])
            await self._hand_over(asked)
        self._expect(standing)

    async def grow(self, node: str) -> None:
        """Play the round that stands open, as branch `node`."""
        self.node, self.resting = node, False
        calls = [call for call, _ in self._seat.open.values()]
        answers = await gather_or_cancel(self._seat.ask(call, node) for call in calls)
        await self._hand_over(list(zip(calls, answers, strict=True)))

    def score(self, alpha: float) -> float:
        """Of the latest round: the local scores of its turns and, once, alpha times what the environment gave."""
        local = sum(
            self._seat.scores.get(call.index, {}).get("local", 0.0) for call, _ in self.rounds[-1]
        )
        return local + alpha * sum(self.episode.rewards[self._before :])

    def _expect(self, calls: Sequence[CallKey]) -> None:
        if self.standing != calls and self.episode.failure is None:
            raise BranchError(
                f"told the same again, it waits for {_names(self.standing)} instead of {_names(calls)}"
            )

    async def _hand_over(self, asked: list[Asked]) -> None:
        self.rounds.append(asked)
        self.resting, self._before = False, len(self.episode.rewards)
        for call, answer in asked:
            _, future = self._seat.open.get(call.index, (None, None))
            if future is not None:  # else the orchestra has given the call up
                set_outcome(future, answer)
        await self.rest()


def _key(call: Call) -> CallKey:
    return call.index, call.agent.name, call.state_key


def _names(calls: Sequence[CallKey]) -> str:
    return (
        ", ".join(f"{agent} (turn {turn}, state {state})" for turn, agent, state in calls)
        or "nobody"
    )


def _reasons(episode: Episode) -> list[str]:
    if not episode.error:
        return []
    late: list[str] = [f"late/{episode.failure.what}"] if isinstance(episode.failure, Late) else []
    undecided = ["undecided"] if isinstance(episode.failure, Undecided) else []
    return [
        f"dropped_branches/{type(episode.failure).__name__ if episode.failure else 'no_step'}",
        *late,
        *undecided,
    ]


def _order(node: str) -> tuple[int, list[int]]:
    path = [int(number) for number in node.split(".") if number]
    return len(path), path
