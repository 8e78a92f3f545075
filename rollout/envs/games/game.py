"""What a game's rules promise, and the environment that plays any of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rollout.envs.protocol import EnvError, Step, ToolCall
from rollout.records import Task

State = TypeVar("State")
Action = TypeVar("Action")


class BadPuzzle(ValueError):
    """A text is no puzzle of the game: says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[State]):
    """What came of one list of actions."""

    state: State
    reward: float
    impossible: int = 0  # actions that the state did not allow and that changed nothing


class Game(Protocol[State]):
    """A game's rules: immutable states, actions as text, rewards as numbers."""

    @property
    def about(self) -> str:
        """The rules and the form of an action list, as a player is told."""

    @property
    def malformed(self) -> float:
        """The reward of a text that is no list of actions."""

    @property
    def fail(self) -> float:
        """The reward that is added when the turns, or the game's own moves, are spent without a solution."""

    def read(self, puzzle: str) -> State:
        """The first state of the puzzle that `show` wrote.

        Raises:
            BadPuzzle: the text is no puzzle of this game.
        """

    def show(self, state: State) -> str:
        """The state as text."""

    def board(self, state: State) -> list[list[str]]:
        """The state as rows of squares, each a sign or a label, for a picture."""

    def play(self, state: State, actions: str) -> Played[State] | None:
        """Carry out a list of actions; None when the text is no such list."""

    def solved(self, state: State) -> bool:
        """Whether nothing is left to do."""

    def spent(self, state: State) -> bool:
        """Whether the game allows no further move."""

    def measure(self, state: State) -> Mapping[str, float]:
        """Metrics of a state, `progress` in [0, 1] among them."""

    def solve(self, state: State) -> str | None:
        """A list of actions that solves `state`, as short as possible where that can be found; None without one."""


def one_by_one(
    game: Game[State], state: State, actions: Sequence[Action], take: Callable[[State, Action], Played[State]]
) -> Played[State]:
    """Take `actions` in their order; those that come after the end of the game are not taken."""
    reward, impossible = 0.0, 0
    for action in actions:
        if game.solved(state) or game.spent(state):
            break
        played = take(state, action)
        state = played.state
        reward += played.reward
        impossible += played.impossible
    return Played(state=state, reward=reward, impossible=impossible)


class GameEnv(Generic[State]):
    """One puzzle for one trajectory; every step is one list of actions.

    It ends when the puzzle is solved, after `max_turns` steps, or when the game allows no further move; the latter two
    add the game's `fail`. A text that is no list of actions changes nothing, has the reward `malformed` and takes a
    turn. Metrics: `solved` (0 or 1), the game's own, and counts of `impossible_actions` and `malformed_actions`.
    """

    def __init__(
        self, game: Game[State], *, max_turns: int, run: Callable[[str], Awaitable[ToolCall]] | None = None
    ) -> None:
        """`max_turns` steps at most; `run` runs programs, without it there is nothing to run them in."""
        self._game = game
        self._max_turns = max_turns
        self._run = run
        self._now: _Moment[State] | None = None

    def reset(self, task: Task) -> str:
        """Start `task`, whose prompt is the first state; returns the game's rules and that state.

        Raises:
            EnvError: the prompt is no puzzle of this game.
        """
        try:
            self._now = _Moment(state=self._game.read(task.prompt))
        except BadPuzzle as error:
            raise EnvError(f"task {task.id}: {error}") from error
        return f"{self._game.about}\n\n{task.prompt}"

    async def step(self, action: str) -> Step:
        """Carry out a list of actions.

        Raises:
            EnvError: there is no puzzle, or it has ended.
        """
        step, self._now = self._next(action)
        return step

    async def preview(self, action: str) -> Step:
        """What `step` would answer, with the puzzle left as it is.

        Raises:
            EnvError: there is no puzzle, or it has ended.
        """
        return self._next(action)[0]

    async def run(self, program: str) -> ToolCall:
        """Run a program (see `Running`); it knows nothing of the puzzle.

        Raises:
            EnvError: the sandbox failed, or there is none.
        """
        if self._run is None:
            raise EnvError("GameEnv has no sandbox to run a program in")
        return await self._run(program)

    def _next(self, action: str) -> tuple[Step, _Moment[State]]:
        game, now = self._game, self._now
        if now is None or now.done:
            raise EnvError(f"GameEnv.step {'before reset' if now is None else 'after the end'}")
        played = game.play(now.state, action)
        state = now.state if played is None else played.state
        reward = game.malformed if played is None else played.reward
        solved = game.solved(state)
        done = solved or now.turns + 1 == self._max_turns or game.spent(state)
        after = _Moment(
            state=state,
            turns=now.turns + 1,
            impossible=now.impossible + (played.impossible if played else 0),
            malformed=now.malformed + (played is None),
            done=done,
        )
        counts = {"impossible_actions": float(after.impossible), "malformed_actions": float(after.malformed)}
        step = Step(
            observation=game.show(state) + _note(played),
            reward=reward + (game.fail if done and not solved else 0.0),
            done=done,
            answer=game.show(state) if after.turns > after.malformed else "",  # teams agree that leave the same state
            metrics={"solved": float(solved), **game.measure(state), **counts},
        )
        return step, after


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment(Generic[State]):
    state: State
    turns: int = 0
    impossible: int = 0
    malformed: int = 0
    done: bool = False


def _note(played: Played[State] | None) -> str:
    if played is None:
        return "\nNo list of actions was given."
    return f"\nImpossible actions: {played.impossible}." if played.impossible else ""
