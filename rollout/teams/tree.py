"""Tree sampling inside any orchestra: branch, score, continue (AT-GRPO, arXiv 2510.11062).

A running orchestra cannot be copied. Therefore a branch is a second instance of the orchestra, with
a new environment, which replays the turns so far from the recorded replies and then continues with
new ones. This requires that orchestra and environment are deterministic given the replies, and that
the orchestra awaits nothing but its team and its environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
from rollout.teams.roles import AgentReply
from rollout.teams.team import Call, RecordedReply, Team, TeamSession

# Cycles of the event loop after which nested gathers have started their calls and handed on results.
_SETTLE_CYCLES = 8

TurnReply = tuple[Turn, AgentReply]  # record of a turn, and the reply that the orchestra gets
CallKey = tuple[int, str, str]  # turn, agent, digest of the messages
CallAnswer = TurnReply | EngineError | EnvError
AnsweredCall = tuple[Call, CallAnswer]
NO_ANSWERS: Mapping[CallKey, CallAnswer] = MappingProxyType({})


class Branching(Section):
    """Tree sampling: branches from every state, scored, of which one continues (AT-GRPO)."""

    # Branches of every round; 1 is the same as no tree.
    width: int = Field(ge=1)
    # Weight of the team's reward in a branch's score.
    alpha: float = 1.0
    # Branch that continues: the best one (the first of equals), or a random one.
    select: Literal["greedy", "sampled"] = "greedy"


@dataclass(eq=False, kw_only=True)
class BranchedPlay:
    """One play of a task by several instances of its orchestra; the first one leads to the outcome."""

    task: Task
    team: Team
    seed_path: tuple[int | str, ...]
    make_env: Callable[[Task], Env]
    orchestra: Orchestra
    tool_s: float | None = None
    env_name: str = ""  # name of the environment in errors and `late/...` metrics; "": `task.env`
    # Record of the tool and environment calls that a restart must not repeat.
    call_record: CallRecord = field(default_factory=CallRecord)

    def __post_init__(self) -> None:
        self.error = ""  # why the play failed
        # Replies in all branches, by the seed of the call.
        self.replies: dict[int, RecordedReply] = {}
        # Branches that are played now; the first one leads to the outcome.
        self._branches = [self._new_branch()]
        # Number of dropped branches, by the metric that counts them (see `dropped_metrics`).
        self._dropped: Counter[str] = Counter()

    def _new_branch(self) -> Branch:
        """Return a branch whose orchestra has not started yet."""
        session = BranchSession(self.team, self.seed_path, self.call_record)
        session.replies = self.replies
        episode = Episode(
            self.task,
            session,
            self.make_env,
            self.orchestra,
            tool_s=self.tool_s,
            name=self.env_name,
        )
        return Branch(episode, session)

    async def play(self) -> None:
        """Play to the end; set `error` if the orchestra or the environment is not deterministic."""
        try:
            await self._branches[0].run_to_calls()
            await self._play_branches()
        except BranchError as failure:
            self.error = (
                f"BranchError: environment or orchestra of task {self.task.id} is not "
                f"deterministic: cannot branch ({failure})"
            )
        finally:
            await gather_or_cancel(branch.close() for branch in self._branches)

    async def _play_branches(self) -> None:
        """Play from the first calls of the first branch to the end, and set `error`."""
        raise NotImplementedError

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the branch that leads to the outcome, and the number of dropped branches.

        Dropped branches are counted by reason as `dropped_branches/<reason>`, and those that were
        late or undecided also as `late/<part>` and `undecided`.
        """
        dropped = {name: float(count) for name, count in self._dropped.items()}
        return self.episode.metrics | dropped

    @property
    def episode(self) -> Episode:
        """The episode of the branch that leads to the outcome."""
        return self._branches[0].episode

    @property
    def waiting(self) -> str:
        """The calls that the branches wait for, as a text; "the orchestra" if they wait for none."""
        calls = [branch.episode.waiting for branch in self._branches if not branch.resting]
        return ", ".join(dict.fromkeys(calls)) or "the orchestra"

    def waits(self) -> list[Wait]:
        """Return the calls that the branches wait for, for a watchdog."""
        waits: list[Wait] = []
        for branch in self._branches:
            if not branch.resting:
                waits += branch.episode.waits()
        return waits


@dataclass(eq=False, kw_only=True)
class Tree(BranchedPlay):
    """One play of a task as a tree, to the end of the branch that continued."""

    branching: Branching

    def __post_init__(self) -> None:
        super().__post_init__()
        self._branch_scores: dict[str, float] = {}  # by node
        # Turns and tool calls of the branches that did not continue, though they had not failed.
        self._side_turns: list[Turn] = []
        self._side_tools: list[ToolEvent] = []

    async def _play_branches(self) -> None:
        """Play rounds until the branch that continues has ended; set `error` if it has failed.

        The play fails if all branches of a round fail, or if the first branch fails before the first
        round. Otherwise, failed branches are only left out of the choice.
        """
        while not self._branches[0].ended:
            await self._play_round()
        self.error = self.episode.error

    async def _play_round(self) -> None:
        """Grow `width` branches from the leading one, each with its own answers, and continue with one."""
        leading = self._branches[0]
        parent = leading.node
        rounds = list(leading.rounds)
        open_calls = leading.open_calls

        # The leading branch is the first of the round; the others catch up with it.
        followers = [self._new_branch() for _ in range(self.branching.width - 1)]
        self._branches = [leading, *followers]
        await gather_or_cancel(branch.repeat(rounds, open_calls) for branch in followers)
        await gather_or_cancel(
            branch.grow(f"{parent}.{number}".lstrip("."))
            for number, branch in enumerate(self._branches)
            if not branch.episode.error
        )

        for branch in self._branches:
            self._dropped.update(failure_metrics(branch.episode))
        grown = [branch for branch in self._branches if not branch.episode.error]
        for branch in grown:
            self._branch_scores[branch.node] = branch.score(self.branching.alpha)
        chosen = self._choose(grown, len(rounds)) if grown else leading
        others = [branch for branch in self._branches if branch is not chosen]
        self._branches = [chosen, *others]  # `play` closes them if this is cancelled
        await gather_or_cancel(branch.close() for branch in others)
        self._branches = [chosen]

        # Only the turns of this round are stored: the earlier ones are also in the chosen branch.
        for branch in others:
            if branch in grown:
                turns = branch.episode.turns
                self._side_turns += [turn for turn in turns if turn.node == branch.node]
                events = branch.episode.tools
                self._side_tools += [event for event in events if event.node == branch.node]

    def _choose(self, grown: Sequence[Branch], depth: int) -> Branch:
        """Return the branch that continues.

        Args:
            grown: branches of the round that have not failed.
            depth: number of rounds before this one.
        """
        if self.branching.select == "sampled":
            return grown[derive_seed(*self.seed_path, "select", depth) % len(grown)]
        return max(grown, key=lambda branch: self._branch_scores[branch.node])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the branch that continued and of the others that have not failed, round by round.

        The score `branch` of a turn is that of its branch.
        """
        turns = []
        for turn in [*self.episode.turns, *self._side_turns]:
            score = self._branch_scores.get(turn.node)
            if score is not None:
                turn = replace(turn, scores={**turn.scores, "branch": score})
            turns.append(turn)
        return tuple(sorted(turns, key=lambda turn: (_node_order(turn.node), turn.index)))

    @property
    def tools(self) -> tuple[ToolEvent, ...]:
        """The tool calls of the same branches as `turns`, round by round."""
        events = [*self.episode.tools, *self._side_tools]
        return tuple(sorted(events, key=lambda event: _node_order(event.node)))

    @property
    def leaf(self) -> str:
        """The node of the branch that continued."""
        return self._branches[0].node


class BranchError(RuntimeError):
    """A branch made other calls than another branch that got the same replies."""


class BranchSession(TeamSession):
    """A session whose calls stay open until the play of its branch answers them."""

    def __init__(
        self, team: Team, seed_path: tuple[int | str, ...], call_record: CallRecord
    ) -> None:
        super().__init__(team, seed_path, call_record.for_branch(self._branch_name))
        self.open: dict[int, tuple[Call, asyncio.Future[TurnReply]]] = {}  # open calls, by turn
        # Set when a call is opened, a wait has ended, or the orchestra has ended.
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[Any] | None] = set()  # all asyncio tasks that have waited

    @contextmanager
    def waits_for(self, awaited: object) -> Iterator[asyncio.Task[Any]]:
        """Record that the running asyncio task waits, and set `changed` when the wait has ended."""
        self.tasks.add(asyncio.current_task())
        try:
            with super().waits_for(awaited) as task:
                yield task
        finally:
            self.changed.set()

    def set_node(self, turn: int, /, node: str) -> None:
        """Raise ValueError: the play sets the nodes of its branches, so the orchestra cannot set them."""
        raise ValueError(
            f"turn {turn} cannot be node {node}: the orchestra grows its own tree; leave out "
            "trainer.branching and trainer.replays"
        )

    def _branch_name(self) -> str:
        """Return a name for the turns so far, under which `CallRecord` stores results of calls.

        These are calls of tools and environments. Branches with the same turns so far have the same
        name, and so share the results that the log holds. In a branch with different turns, an equal
        call has its own result.
        """
        seeds = [turn.seed for _, turn in sorted(self._turns.items())]
        return str(derive_seed(*seeds)) if seeds else ""

    def _scores_of(self, turn: Turn) -> dict[str, float]:
        """Return a copy of a new turn's scores: other branches have the same turn, with other scores."""
        return dict(turn.scores)

    async def _ask(self, call: Call, node: str = "") -> TurnReply:
        """Open a call, and wait for its answer, which `Branch` hands over."""
        answer: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self.open[call.index] = call, answer
        self.changed.set()
        try:
            return await answer
        finally:
            self.open.pop(call.index, None)

    async def ask_policy(self, call: Call, node: str) -> CallAnswer:
        """Ask the policy of an open call; return its answer or its failure."""
        try:
            return await super()._ask(call, node)
        except (EngineError, EnvError) as failure:
            return failure


class Branch:
    """An instance of the orchestra that is played one round at a time.

    A round consists of the calls that are open once the orchestra waits for nothing else. The
    policies answer them concurrently, and the answers are handed over together, in the order of the
    calls. These rounds are not those of `Turn.round`, which steps of the environment separate.

    Attributes:
        node: `Turn.node` of the turns that were sampled in the latest round.
        rounds: answered calls of each round so far.
        resting: True between two rounds: the orchestra has ended, or waits for open calls that
            nobody answers yet.
    """

    def __init__(self, episode: Episode, session: BranchSession) -> None:
        self.episode = episode
        self.node = ""
        self.rounds: list[list[AnsweredCall]] = []
        self.resting = False
        self._session = session
        self._steps_before = 0  # number of steps before the latest round was answered
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """True if the orchestra has ended."""
        return self._task is not None and self._task.done()

    @property
    def open_calls(self) -> list[CallKey]:
        """The keys of the calls that are open."""
        return [call_key(call) for call, _ in self._session.open.values()]

    async def run_to_calls(self) -> None:
        """Run the orchestra until it has ended, or waits for open calls and nothing else.

        If the orchestra's task has ended with an exception, this raises it.
        """
        session = self._session
        if self._task is None:
            self._task = asyncio.create_task(self.episode.play())
            self._task.add_done_callback(lambda _: session.changed.set())
        while not self._task.done():
            session.changed.clear()
            # The innermost waits are those for the open calls, and those for steps and running tools.
            # (A tool that waits for an open call itself is not counted.) If there are as many waits as
            # open calls, no step or tool is running.
            only_calls_pending = len(session.open) == len(session.innermost_waits)
            if session.open and only_calls_pending:
                # Tasks may still take their answers or make further calls, which sets `changed`. A
                # single task does so in one cycle; nested gathers need several.
                cycles = 1 if session.tasks == {self._task} else _SETTLE_CYCLES
                for _ in range(cycles):
                    await asyncio.sleep(0)
                if not session.changed.is_set():
                    break
            else:
                await session.changed.wait()
        self.resting = True
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Cancel the orchestra, unless it has ended."""
        if self._task is not None:
            await cancel_tasks([self._task])

    async def repeat(
        self, rounds: Sequence[list[AnsweredCall]], open_calls: Sequence[CallKey]
    ) -> None:
        """Repeat `rounds` with their recorded answers, until the orchestra waits for `open_calls`.

        Raises:
            BranchError: the orchestra waits for other calls than in `rounds` or `open_calls`.
        """
        await self.run_to_calls()
        for answered in rounds:
            self._check_open_calls([call_key(call) for call, _ in answered])
            await self._hand_over(answered)
        self._check_open_calls(open_calls)

    async def grow(self, node: str, recorded: Mapping[CallKey, CallAnswer] = NO_ANSWERS) -> None:
        """Answer the open calls, and run the orchestra to its next calls.

        Args:
            node: `Turn.node` of the turns that are sampled.
            recorded: answers that are used in place of asking a policy, by call.
        """
        self.node = node
        self.resting = False

        async def answer(call: Call) -> CallAnswer:
            key = call_key(call)
            return recorded[key] if key in recorded else await self._session.ask_policy(call, node)

        calls = [call for call, _ in self._session.open.values()]
        answers = await gather_or_cancel(map(answer, calls))
        await self._hand_over(list(zip(calls, answers, strict=True)))

    def score(self, alpha: float) -> float:
        """Return the score of the latest round.

        It is the sum of the turns' local scores, plus `alpha` times the sum of the environment's
        rewards since the round was answered.
        """
        scores = self._session.scores
        local = sum(scores.get(call.index, {}).get("local", 0.0) for call, _ in self.rounds[-1])
        return local + alpha * sum(self.episode.rewards[self._steps_before :])

    def _check_open_calls(self, expected: Sequence[CallKey]) -> None:
        """Raise BranchError if other calls are open, unless the episode has a `failure`."""
        if self.open_calls != expected and self.episode.failure is None:
            raise BranchError(
                f"with the same replies, the orchestra waits for {_describe_calls(self.open_calls)} instead of "
                f"{_describe_calls(expected)}"
            )

    async def _hand_over(self, answered: list[AnsweredCall]) -> None:
        """Hand the answers of a round to the orchestra, and run it to its next calls."""
        self.rounds.append(answered)
        self.resting = False
        self._steps_before = len(self.episode.rewards)
        for call, answer in answered:
            if call.index in self._session.open:  # else the orchestra has given the call up
                _, future = self._session.open[call.index]
                set_outcome(future, answer)
        await self.run_to_calls()


def call_key(call: Call) -> CallKey:
    """Return the key of a call; equal keys mean that the same agent is asked the same."""
    return call.index, call.agent.name, call.state_key


def _describe_calls(calls: Sequence[CallKey]) -> str:
    """Return the agent, the turn and the digest of the messages of each call; "nobody" without calls."""
    texts = [f"{agent} (turn {turn}, digest of messages {digest})" for turn, agent, digest in calls]
    return ", ".join(texts) or "nobody"


def failure_metrics(episode: Episode) -> list[str]:
    """Return the names of the metrics that count a failed branch; [] if it has not failed."""
    return dropped_metrics(episode.failure) if episode.error else []


def dropped_metrics(failure: EngineError | EnvError | None) -> list[str]:
    """Return the names of the metrics that count a dropped branch.

    A branch is dropped if it fails, or if it is a replay whose changed turn got no reply from the
    policy. A branch that only was not chosen to continue is not dropped.

    Args:
        failure: why it was dropped; None: the orchestra ended without a step in the environment.
    """
    names = [f"dropped_branches/{type(failure).__name__ if failure else 'no_step'}"]
    if isinstance(failure, Late):
        names.append(f"late/{failure.part}")
    if isinstance(failure, Undecided):
        names.append("undecided")
    return names


def _node_order(node: str) -> tuple[int, list[int]]:
    """Return a sort key that orders nodes by depth, then by their branch numbers."""
    numbers = [int(number) for number in node.split(".") if number]
    return len(numbers), numbers
