"""Trees of turns inside any orchestra: branch, score, continue (AT-GRPO, Stronger-MAS, arXiv 2510.11062).

A running orchestra cannot be copied, so a branch is a second instance of it, with an environment of its own, that
repeats the line so far from the recorded replies and then goes on by itself. That needs an orchestra and an environment
that do the same when they are told the same, and an orchestra that waits for nothing but its team and its environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollout.base.deadlines import Late
from rollout.base.errors import EngineError, EnvError, Undecided
from rollout.base.seeds import derive_seed
from rollout.base.task_group import together
from rollout.base.watchdog import Wait
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task, ToolEvent, Turn
from rollout.teams.branch import Branch, BranchError, BranchSeat
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How a tree grows.

    Raises:
        ValueError: the width or the choice is out of range.
    """

    width: int  # branches of every round; 1 plays what is played without a tree
    alpha: float = 1.0  # share of the team's reward in a branch's score
    select: Literal["greedy", "sampled"] = "greedy"  # the best branch goes on (the first of equals), or any

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a tree of width {self.width}; expected at least 1")
        if self.select not in ("greedy", "sampled"):
            raise ValueError(f"a tree selects '{self.select}'; expected greedy or sampled")


class Tree:
    """A task played as a tree, from its start to the end of the branch that went on."""

    def __init__(
        self,
        branching: Branching,
        task: Task,
        team: Team,
        place: tuple[int | str, ...],
        make_env: Callable[[Task], Env],
        orchestra: Orchestra,
        *,
        tool_s: float | None = None,
    ) -> None:
        def sprout() -> Branch:
            return Branch(task, BranchSeat(team, place), make_env(task), orchestra, tool_s=tool_s)

        self.error = ""  # why it failed
        self._branching = branching
        self._task = task
        self._place = place
        self._sprout = sprout
        self._branches = [sprout()]  # that play; the first leads: its line is the tree's
        self._scores: dict[str, float] = {}  # by node
        self._turns: list[Turn] = []  # of the branches that did not go on
        self._tools: list[ToolEvent] = []
        self._dropped: Counter[str] = Counter()  # branches that failed, by reason and by what was late

    async def play(self) -> None:
        """Grow the tree to its end. It fails when all branches of a round fail, or when it cannot branch."""
        try:
            await self._lead.rest()
            while not self._lead.ended:
                await self._round()
            self.error = self._lead.line.error
        except BranchError as failure:
            what = f"environment or orchestra of task {self._task.id} is not deterministic: cannot branch"
            self.error = f"BranchError: {what} ({failure})"
        finally:
            await together(branch.close() for branch in self._branches)

    async def _round(self) -> None:
        lead = self._lead
        parent, rounds, standing = lead.node, list(lead.rounds), lead.standing
        followers = [self._sprout() for _ in range(self._branching.width - 1)]
        self._branches = [lead, *followers]
        await together(branch.follow(rounds, standing) for branch in followers)
        await together(
            branch.grow(f"{parent}.{number}".lstrip("."))
            for number, branch in enumerate(self._branches)
            if not branch.line.error
        )
        self._dropped.update(name for branch in self._branches for name in _reasons(branch.line))
        grown = [branch for branch in self._branches if not branch.line.error]
        self._scores |= {branch.node: branch.score(self._branching.alpha) for branch in grown}
        chosen = self._choose(grown, len(rounds)) if grown else lead
        others = [branch for branch in self._branches if branch is not chosen]
        self._branches = [chosen, *others]
        await together(branch.close() for branch in others)
        self._branches = [chosen]
        for branch in others:
            if branch in grown:
                self._turns += [turn for turn in branch.line.turns if turn.node == branch.node]
                self._tools += [event for event in branch.line.tools if event.node == branch.node]

    def _choose(self, grown: Sequence[Branch], depth: int) -> Branch:
        if self._branching.select == "sampled":
            return grown[derive_seed(*self._place, "select", depth) % len(grown)]
        return max(grown, key=lambda branch: self._scores[branch.node])

    @property
    def _lead(self) -> Branch:
        return self._branches[0]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every branch's turns, round by round; the score `branch` is that of the turn's round."""
        turns = sorted([*self._lead.line.turns, *self._turns], key=lambda turn: (_order(turn.node), turn.index))
        return tuple(
            replace(turn, scores={**turn.scores, "branch": self._scores[turn.node]})
            if turn.node in self._scores
            else turn
            for turn in turns
        )

    @property
    def tools(self) -> tuple[ToolEvent, ...]:
        """Every branch's tool calls, round by round."""
        return tuple(sorted([*self._lead.line.tools, *self._tools], key=lambda event: _order(event.node)))

    @property
    def leaf(self) -> str:
        """The node of the branch that went on."""
        return self._lead.node

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the line that went on, and how many branches failed, by reason.

        Names: `dropped_branches/<reason>`, and of those `late/<what>` and `undecided`.
        """
        return self._lead.line.metrics | {why: float(n) for why, n in self._dropped.items()}

    @property
    def failure(self) -> EngineError | EnvError | None:
        """Who is to blame that the line that went on failed, if not the orchestra."""
        return self._lead.line.failure

    @property
    def outcome(self) -> float | None:
        """Of the line that went on."""
        return self._lead.line.outcome

    @property
    def answer(self) -> str | None:
        """Of the line that went on."""
        return self._lead.line.answer

    @property
    def waiting(self) -> str:
        """Whom or what the branches wait for."""
        waiting = (branch.line.waiting for branch in self._branches if not branch.resting)
        return ", ".join(dict.fromkeys(waiting)) or "the orchestra"

    def waits(self) -> list[Wait]:
        """What its branches wait for, for a watchdog."""
        return [wait for branch in self._branches if not branch.resting for wait in branch.line.waits()]


def _reasons(line: Episode) -> list[str]:
    if not line.error:
        return []
    late: list[str] = [f"late/{line.failure.what}"] if isinstance(line.failure, Late) else []
    undecided = ["undecided"] if isinstance(line.failure, Undecided) else []
    return [f"dropped_branches/{type(line.failure).__name__ if line.failure else 'no_step'}", *late, *undecided]


def _order(node: str) -> tuple[int, list[int]]:
    path = [int(number) for number in node.split(".") if number]
    return len(path), path
