"""Game environments: what a game's rules and its generator promise, action lists, grids, and the environment itself."""

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import PositiveInt

from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.protocol import Step
from rollout.environments.running import CalculatingEnv
from rollout.records.trajectory import Task

_State = TypeVar("_State")
_Action = TypeVar("_Action")

RULES: Mapping[str, str] = read_yaml(Path(__file__).with_name("rules.yaml"))  # as players are told


class BadPuzzle(ValueError):
    """A text is no puzzle of the game: says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[_State]):
    """What came of one list of actions."""

    state: _State
    reward: float
    impossible: int = 0  # actions that the state did not allow and that changed nothing


class Game(Protocol[_State]):
    """A game's rules: immutable states, actions as text, rewards as numbers."""

    about: ClassVar[str]  # the rules and the form of an action list, as a player is told

    @property
    def malformed(self) -> float:
        """The reward of a text that is no list of actions."""

    @property
    def fail(self) -> float:
        """The reward that is added when the turns, or the game's own moves, are spent without a solution."""

    def read(self, puzzle: str) -> _State:
        """The first state of the puzzle that `show` wrote; BadPuzzle if the text is no puzzle of this game."""

    def show(self, state: _State) -> str:
        """The state as text: its board, unless the game says more."""
        return "\n".join(" ".join(row) for row in self.board(state))

    def board(self, state: _State) -> list[list[str]]:
        """The state as rows of squares, each a sign or a label, for a picture."""

    def play(self, state: _State, actions: str) -> Played[_State] | None:
        """Carry out a list of actions; None when the text is no such list."""

    def solved(self, state: _State) -> bool:
        """Whether nothing is left to do."""

    def spent(self, state: _State) -> bool:
        """Whether the game allows no further move; most allow one whatever was done."""
        return False

    def measure(self, state: _State) -> Mapping[str, float]:
        """Metrics of a state, `progress` in [0, 1] among them."""

    def solve(self, state: _State) -> str | None:
        """A list of actions that solves `state`, as short as possible where that can be found; None without one."""


def one_by_one(
    game: Game[_State],
    state: _State,
    actions: Sequence[_Action],
    take: Callable[[_State, _Action], Played[_State]],
) -> Played[_State]:
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


@dataclass(eq=False, kw_only=True)
class GameEnv(CalculatingEnv, Generic[_State]):
    """A puzzle, on which every step is one list of actions.

    It ends when the puzzle is solved, after `max_turns` steps, or when the game allows no further move; the latter two
    add the game's `fail`. A text that is no list of actions changes nothing, has the reward `malformed` and takes a
    turn. Metrics: `solved` (0 or 1), the game's own, and counts of `impossible_actions` and `malformed_actions`.

    Args:
        max_turns: steps at most.
        rewards: of the game's rules.
    """

    game: ClassVar[type[Game[Any]]]
    max_turns: PositiveInt = 5
    rewards: Game[_State] | None = None
    _state: _State | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _impossible: int = field(default=0, init=False)
    _malformed: int = field(default=0, init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._game: Game[_State] = self.rewards or self.game()

    def reset(self, task: Task) -> str:
        """Start `task`, whose prompt is the first state; returns the game's rules and that state."""
        try:
            self._state = self._game.read(task.prompt)
        except BadPuzzle as error:
            raise EnvError(f"task {task.id}: {error}") from error
        self._turns = self._impossible = self._malformed = 0
        self._done = False
        return f"{self._game.about}\n\n{task.prompt}"

    async def step(self, action: str) -> Step:
        """Carry out a list of actions."""
        game, state = self._game, self._state
        if state is None or self._done:
            raise EnvError(f"GameEnv.step {'before reset' if state is None else 'after the end'}")
        played = game.play(state, action)
        state = self._state = state if played is None else played.state
        self._turns += 1
        self._impossible += played.impossible if played else 0
        self._malformed += played is None
        reward, solved = game.malformed if played is None else played.reward, game.solved(state)
        self._done = solved or self._turns == self.max_turns or game.spent(state)
        counts = {
            "impossible_actions": float(self._impossible),
            "malformed_actions": float(self._malformed),
        }
        return Step(
            observation=game.show(state) + _note(played),
            reward=reward + (game.fail if self._done and not solved else 0.0),
            done=self._done,
            answer=game.show(state)
            if self._turns > self._malformed
            else "",  # teams agree that leave the same state
            metrics={"solved": float(solved), **game.measure(state), **counts},
        )

    async def preview(self, action: str) -> Step:
        return await copy(self).step(action)

    def state(self) -> str:
        return "" if self._state is None else self._game.show(self._state)


def game_env(name: str, game: type[Game[Any]]) -> type[GameEnv[Any]]:
    """The environment of puzzles of one game, whose rewards are the option `rewards`."""
    namespace = {"__doc__": GameEnv.__doc__, "__module__": __name__, "game": game}
    rewards = ("rewards", game | None, None)
    return make_dataclass(
        name, [rewards], bases=(GameEnv,), namespace=namespace, eq=False, kw_only=True
    )


def _note(played: Played[_State] | None) -> str:
    if played is None:
        return "\nNo list of actions was given."
    return f"\nImpossible actions: {played.impossible}." if played.impossible else ""


_LIST = r"\[[^\[\]]*\]"
_LISTS = rf"{_LIST}(?:\s*,\s*{_LIST})*"
_NESTED = re.compile(rf"\[\s*{_LISTS}\s*\]|{_LISTS}")
_FLAT = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_SIGNS = str.maketrans({"(": "[", ")": "]", '"': None, "'": None})
_MAX_CHARS = 2000  # a longer list is a reply gone wrong


def items(text: str) -> list[str]:
    """The actions of a list, [] when `text` is none.

    Actions are separated by commas, and an action's words by spaces: `R, R, D` and `1 2 4, 2 1 3`. What Python or JSON
    prints is the same list: `["R", "R", "D"]` and `[[1, 2, 4], [2, 1, 3]]`.
    """
    text = text.strip().translate(_SIGNS)
    if not text or len(text) > _MAX_CHARS:
        return []
    if flat := _FLAT.fullmatch(text):
        found = (flat[1] or flat[2] or "").split(",")
    elif _NESTED.fullmatch(text):
        found = [group.replace(",", " ") for group in re.findall(r"\[([^\[\]]*)\]", text)]
    else:
        return []
    words = [" ".join(action.split()) for action in found]
    return words if all(words) else []


def letters(text: str, alphabet: str) -> list[str]:
    """The actions of a list of single letters of `alphabet`, commas optional: `R, R, D` or `R R D`; [] when not one."""
    found = " ".join(items(text)).split()
    return found if all(len(letter) == 1 and letter in alphabet for letter in found) else []


_Node = TypeVar("_Node", bound=Hashable)


def parse_rows(text: str, signs: str) -> list[list[str]]:
    """Rows of signs with spaces between; BadPuzzle if a sign is not in `signs`, or they are no rectangle."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        raise BadPuzzle("expected rows of signs separated by spaces, all of one length")
    unknown = sorted({sign for row in rows for sign in row} - set(signs))
    if unknown:
        raise BadPuzzle(f"unknown sign '{unknown[0]}'; expected one of {' '.join(signs)}")
    return rows


def breadth_first(
    start: _Node,
    after: Callable[[_Node], Iterable[tuple[str, _Node]]],
    found: Callable[[_Node], bool],
) -> list[str] | None:
    """The fewest actions from `start` to a node that is `found`, None when there are none.

    Args:
        after: (action, node it leads to) of every action in a node, in a fixed order.
    """
    came: dict[_Node, tuple[str, _Node] | None] = {start: None}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if found(node):
            actions = []
            step = came[node]
            while step is not None:
                actions.append(step[0])
                step = came[step[1]]
            return actions[::-1]
        for action, other in after(node):
            if other not in came:
                came[other] = (action, node)
                queue.append(other)
    return None


Owns = Callable[[str], bool]  # whether a puzzle with this key may be drawn


class PuzzleSource(Protocol):
    """The generator of a game's puzzles: all of them with given options."""

    game: ClassVar[str]  # name in GAMES
    named: ClassVar[str]  # the data source, in which results are reported, with gaps for options

    @property
    def name(self) -> str:
        """The data source."""
        return self.named.format(self)

    def draw(self, random: Random, owns: Owns) -> str | None:
        """A random solvable puzzle as the game shows it; None when this draw came to none, or to one not owned.

        `owns` is asked with a key as early as it is known. Puzzles that differ in key have nothing in common that
        could be learned by heart.
        """

    def everything(self) -> Sequence[tuple[str, str]] | None:
        """(key, puzzle) of every puzzle in a fixed order, where they are few enough to list; else None."""
        return None

    def slip(self, random: Random, actions: str) -> str:
        """A list of actions with one mistake."""


def replace_one(random: Random, actions: str, pattern: str, alphabet: Sequence[str]) -> str:
    """`actions` with one match of `pattern`, any of them, replaced by another word of `alphabet`."""
    chosen = random.choice(list(re.finditer(pattern, actions)))
    other = random.choice([word for word in alphabet if word != chosen[0]])
    return actions[: chosen.start()] + other + actions[chosen.end() :]
