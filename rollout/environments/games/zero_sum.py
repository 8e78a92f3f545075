"""Zero-sum games of two players, also with hidden cards: rules, and the environment that plays them.

`ZeroSumGame` is the interface of the rules and `ZeroSumEnv` plays any such game. All chance moves
of a game are made at its start: the deal, which is the prompt of a task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rollout.base.errors import EnvError
from rollout.environments.games.game import BadPuzzle
from rollout.environments.protocol import Decision, Step
from rollout.records.trajectory import Task

_State = TypeVar("_State")

# Players of every game. Agents that play them have the same names.
FIRST = "first"
SECOND = "second"
PLAYERS = (FIRST, SECOND)


class ZeroSumGame(Protocol[_State]):
    """Rules of a game over immutable, hashable states.

    The games have perfect recall: `observe` returns everything that a player has seen since the
    deal. Only if both players see the whole state, as in tic-tac-toe, may it leave out the order of
    the moves that led to the state, because the order makes no difference then.

    Attributes:
        about: the rules, in the words of the prompt.
        forfeit: number of points that a player loses by a reply that is not a legal action.
    """

    about: ClassVar[str]
    forfeit: ClassVar[float]

    def deals(self) -> Mapping[str, float]:
        """Return the probability of every deal."""

    def read(self, deal: str) -> _State:
        """Return the first state after a deal.

        Raises:
            BadPuzzle: the text is not a deal of this game.
        """

    def player(self, state: _State) -> str | None:
        """Return the player whose turn it is; None at the end of the game."""

    def observe(self, state: _State) -> str:
        """Return everything that the player whose turn it is has seen so far.

        It includes the legal actions, unless they are the same in all states.
        """

    def legal_actions(self, state: _State) -> Sequence[str]:
        """Return the actions that the rules allow in a state, at least one before the end."""

    def play(self, state: _State, action: str) -> _State:
        """Return the state after a legal action."""

    def payoff(self, state: _State) -> float:
        """Return the points that the first player has won at the end; the second has lost them."""


@dataclass(eq=False, kw_only=True)
class ZeroSumEnv(Generic[_State]):
    """A zero-sum game of the players `first` and `second`.

    Every step is one action of the player whose turn it is. The reward of the last step is the
    payoff: the number of points that `first` has won, negative if it has lost. Earlier steps have the
    reward 0. A text that is not a legal action forfeits the game. Metrics of the last step are
    `solved` (1 if `first` has won, 0.5 after a draw, else 0), `payoff`, and `forfeited` (0 or 1).
    """

    game: ClassVar[type[ZeroSumGame[Any]]]
    task: Task = field(kw_only=False)
    _state: _State | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._game: ZeroSumGame[_State] = self.game()

    def reset(self, task: Task) -> str:
        """Start a game, whose deal is the task's prompt; return the rules."""
        try:
            self._state = self._game.read(task.prompt)
        except BadPuzzle as error:
            raise EnvError(f"task {task.id}: {error}") from error
        self._done = False
        return self._game.about

    async def decision(self) -> Decision:
        """Return the player whose turn it is, and the player's observation."""
        state = self._running_state()
        player = self._game.player(state)
        assert player is not None, "a game that is running has a player to move"
        return Decision(player=player, observation=self._game.observe(state))

    async def step(self, action: str) -> Step:
        """Carry out an action of the player whose turn it is; an illegal one forfeits the game."""
        state = self._running_state()
        player = self._game.player(state)
        forfeited = action not in self._game.legal_actions(state)
        if forfeited:
            payoff = self._game.forfeit if player == SECOND else -self._game.forfeit
        else:
            state = self._game.play(state, action)
            self._state = state
            if self._game.player(state) is not None:
                return Step()
            payoff = self._game.payoff(state)

        self._done = True
        metrics = {
            "solved": _solved(payoff),
            "payoff": payoff,
            "forfeited": float(forfeited),
        }
        return Step(reward=payoff, done=True, metrics=metrics)

    def state(self) -> str:
        """Return the observation of the player whose turn it is; "" if no game is being played."""
        if self._state is None or self._done:
            return ""
        return self._game.observe(self._state)

    def _running_state(self) -> _State:
        """Return the state; raise EnvError before `reset` and after the end."""
        if self._state is None or self._done:
            raise EnvError(f"{type(self).__name__}: no game is being played; call reset first")
        return self._state


def _solved(payoff: float) -> float:
    """Return 1 if the first player has won, 0.5 after a draw, and else 0."""
    if payoff > 0:
        return 1.0
    return 0.5 if payoff == 0 else 0.0


def zero_sum_env(game: type[ZeroSumGame[Any]]) -> type[ZeroSumEnv[Any]]:
    """Return the environment class of one game: ZeroSumEnv with `game` set."""
    namespace = {"__doc__": ZeroSumEnv.__doc__, "__module__": __name__, "game": game}
    return type(f"{game.__name__}Env", (ZeroSumEnv,), namespace)
