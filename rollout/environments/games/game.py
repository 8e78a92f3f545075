"""Games that are puzzles: interfaces of rules and of generators, the environment, and shared helpers.

`Game` and `PuzzleSource` are the interfaces; `GameEnv` plays any `Game`. The helpers parse lists of
actions and grids, and search for shortest solutions. Games of two players are in `zero_sum`.
"""

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

# Rules of each game in the words of the prompt.
RULES: Mapping[str, str] = read_yaml(Path(__file__).with_name("rules.yaml"))


class BadPuzzle(ValueError):
    """A text is not a puzzle of the game; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[_State]):
    """Result of a list of actions.

    Attributes:
        impossible_actions: number of actions that the rules did not allow; they did not change
            the board.
    """

    state: _State
    reward: float
    impossible_actions: int = 0


class Game(Protocol[_State]):
    """Rules of a game over immutable states, with its rewards as fields.

    Attributes:
        about: rules and form of an action list, in the words of the prompt.
    """

    about: ClassVar[str]

    @property
    def malformed(self) -> float:
        """Reward of a text that is not a list of actions."""

    @property
    def fail(self) -> float:
        """Reward that is added if the game ends without a solution, after the last turn or the last move."""

    def read(self, puzzle: str) -> _State:
        """Return the first state of a puzzle that `show` has written.

        Raises:
            BadPuzzle: the text is not a puzzle of this game.
        """

    def show(self, state: _State) -> str:
        """Return the state as text, by default its board."""
        return "\n".join(" ".join(row) for row in self.board(state))

    def board(self, state: _State) -> list[list[str]]:
        """Return the rows of a picture of the state.

        Each square is a sign, such as `#`, which the picture shows in a colour, or a label, such as a
        digit.
        """

    def play(self, state: _State, actions: str) -> Played[_State] | None:
        """Carry out a list of actions; return None if the text is not such a list."""

    def solved(self, state: _State) -> bool:
        """Return True if the puzzle is solved."""

    def spent(self, state: _State) -> bool:
        """Return True if the game allows no further move; by default it always allows one."""
        return False

    def measure(self, state: _State) -> Mapping[str, float]:
        """Return metrics of a state, among them `progress` in [0, 1]."""

    def solve(self, state: _State) -> str | None:
        """Return a list of actions that solves a state, as a text; None if there is none.

        In a game of moves it is a shortest list.
        """


def play_one_by_one(
    game: Game[_State],
    state: _State,
    actions: Sequence[_Action],
    take: Callable[[_State, _Action], Played[_State]],
) -> Played[_State]:
    """Carry out actions one by one, until the end of the game.

    Args:
        game: decides when the game has ended.
        state: state before the first action.
        actions: parsed actions.
        take: carries out one action.

    Returns:
        The last state, the sum of the rewards, and the number of impossible actions.
    """
    reward = 0.0
    impossible_actions = 0
    for action in actions:
        if game.solved(state) or game.spent(state):
            break
        played = take(state, action)
        state = played.state
        reward += played.reward
        impossible_actions += played.impossible_actions
    return Played(state=state, reward=reward, impossible_actions=impossible_actions)


@dataclass(eq=False, kw_only=True)
class GameEnv(CalculatingEnv, Generic[_State]):
    """A puzzle of a game; every step is one list of actions.

    The trajectory ends when the puzzle is solved, after `max_turns` steps, or when the game allows
    no further move. The last two cases add the game's reward `fail`. A text that is not a list of
    actions changes nothing, has the reward `malformed` and counts as a step. Metrics are `solved` (0
    or 1), those of the game, `impossible_actions` (number of actions that the rules did not allow)
    and `malformed_actions` (number of texts that were not lists of actions).

    Args:
        max_turns: maximum number of steps; after them the trajectory ends.
        rewards: rewards of the game; null: the game's defaults.
    """

    game: ClassVar[type[Game[Any]]]
    max_turns: PositiveInt = 5
    rewards: Game[_State] | None = None
    _state: _State | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _impossible_actions: int = field(default=0, init=False)
    _malformed_actions: int = field(default=0, init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # The fields of a game are its rewards, so the option `rewards` is a game with other rewards.
        self._game: Game[_State] = self.rewards or self.game()

    def reset(self, task: Task) -> str:
        """Start a task, whose prompt is the first state; return the rules and that state."""
        try:
            self._state = self._game.read(task.prompt)
        except BadPuzzle as error:
            raise EnvError(f"task {task.id}: {error}") from error
        self._turns = 0
        self._impossible_actions = 0
        self._malformed_actions = 0
        self._done = False
        return f"{self._game.about}\n\n{task.prompt}"

    async def step(self, action: str) -> Step:
        """Carry out a list of actions."""
        game = self._game
        state = self._state
        if state is None:
            raise EnvError("GameEnv.step before reset")
        if self._done:
            raise EnvError("GameEnv.step after the end")

        self._turns += 1
        played = game.play(state, action)
        if played is None:
            self._malformed_actions += 1
            reward = game.malformed
        else:
            self._impossible_actions += played.impossible_actions
            reward = played.reward
            state = played.state
            self._state = state

        solved = game.solved(state)
        self._done = solved or self._turns == self.max_turns or game.spent(state)
        if self._done and not solved:
            reward += game.fail

        # The answer is the state, so two trajectories have the same answer if they reach the same
        # state. A trajectory without a single list of actions has no answer yet.
        has_acted = self._turns > self._malformed_actions
        return Step(
            observation=game.show(state) + _note(played),
            reward=reward,
            done=self._done,
            answer=game.show(state) if has_acted else "",
            metrics={
                "solved": float(solved),
                **game.measure(state),
                "impossible_actions": float(self._impossible_actions),
                "malformed_actions": float(self._malformed_actions),
            },
        )

    async def preview(self, action: str) -> Step:
        # A shallow copy is enough, because the game's states are immutable.
        return await copy(self).step(action)

    def state(self) -> str:
        """Return the current state as text; "" before `reset`."""
        return "" if self._state is None else self._game.show(self._state)


def game_env(name: str, game: type[Game[Any]]) -> type[GameEnv[Any]]:
    """Return the environment class of one game: GameEnv with `game` set.

    Its option `rewards` is an instance of `game`, because a game's rewards are the fields of its class.
    """
    return make_dataclass(
        name,
        [("rewards", game | None, None)],
        bases=(GameEnv,),
        namespace={"__doc__": GameEnv.__doc__, "__module__": __name__, "game": game},
        eq=False,
        kw_only=True,
    )


def _note(played: Played[_State] | None) -> str:
    """Return the line of an observation that reports malformed or impossible actions; "" without any."""
    if played is None:
        return "\nNo list of actions was given."
    if played.impossible_actions:
        return f"\nImpossible actions: {played.impossible_actions}."
    return ""


_LIST = r"\[[^\[\]]*\]"
_LISTS = rf"{_LIST}(?:\s*,\s*{_LIST})*"
# A list of lists, and a list of words, each with or without its outer brackets.
_NESTED = re.compile(rf"\[\s*{_LISTS}\s*\]|{_LISTS}")
_FLAT = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_PLAIN_SPELLING = str.maketrans({"(": "[", ")": "]", '"': None, "'": None})
_MAX_CHARS = 2000  # a longer list is a failed generation


def parse_actions(text: str) -> list[str]:
    """Return the actions of a list; [] if the text is not a list, is too long or has an empty action.

    Actions are separated by commas, and the words of an action by spaces, as in `R, R, D` or
    `1 2 4, 2 1 3`. Lists that Python or JSON has printed are accepted too: `["R", "R", "D"]` or
    `[[1, 2, 4], [2, 1, 3]]`.
    """
    text = text.strip().translate(_PLAIN_SPELLING)
    if not text or len(text) > _MAX_CHARS:
        return []

    flat = _FLAT.fullmatch(text)
    if flat:
        parts = (flat[1] or flat[2] or "").split(",")
    elif _NESTED.fullmatch(text):
        parts = [part.replace(",", " ") for part in re.findall(r"\[([^\[\]]*)\]", text)]
    else:
        return []
    actions = [" ".join(part.split()) for part in parts]
    return actions if all(actions) else []


def parse_letters(text: str, alphabet: str) -> list[str]:
    """Return the actions of a list of letters of `alphabet`; [] if the text is not such a list.

    Letters may also be separated by spaces alone: `R, R, D` and `R R D` are the same list of the
    alphabet "UDLR".
    """
    words = " ".join(parse_actions(text)).split()
    if all(len(word) == 1 and word in alphabet for word in words):
        return words
    return []


def parse_rows(text: str, signs: str) -> list[list[str]]:
    """Return the rows of a grid of signs that are separated by spaces.

    Raises:
        BadPuzzle: there are no rows, they have different lengths, or a sign is not among `signs`.
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        raise BadPuzzle("expected rows of signs separated by spaces, all of one length")
    unknown = sorted({sign for row in rows for sign in row} - set(signs))
    if unknown:
        raise BadPuzzle(f"unknown sign '{unknown[0]}'; expected one of {' '.join(signs)}")
    return rows


_Node = TypeVar("_Node", bound=Hashable)


def breadth_first(
    start: _Node,
    successors: Callable[[_Node], Iterable[tuple[str, _Node]]],
    is_goal: Callable[[_Node], bool],
) -> list[str] | None:
    """Return a shortest list of actions from a node to a goal; None if no goal can be reached.

    Args:
        start: first node.
        successors: returns (action, next node) for every action that is possible in a node, in a
            fixed order.
        is_goal: returns True for a goal.
    """
    # The action that first led to each node, and the node before it; None for the start.
    origins: dict[_Node, tuple[str, _Node] | None] = {start: None}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if is_goal(node):
            return _actions_to(node, origins)
        for action, successor in successors(node):
            if successor not in origins:
                origins[successor] = (action, node)
                queue.append(successor)
    return None


def _actions_to(node: _Node, origins: Mapping[_Node, tuple[str, _Node] | None]) -> list[str]:
    """Follow the origins of a node back to the start; return the actions in their order."""
    actions = []
    origin = origins[node]
    while origin is not None:
        action, previous = origin
        actions.append(action)
        origin = origins[previous]
    return actions[::-1]


Owns = Callable[[str], bool]  # returns True if a split may have the puzzles with this key


class PuzzleSource(Protocol):
    """Generator of puzzles of one game; its options are fields.

    Every puzzle has a key. If memorising one puzzle could help to solve another, both have the same
    key. All puzzles of one key are in the same split.

    Attributes:
        game: name in GAMES.
        name_format: `str.format` template of `name`, such as "sudoku_{0.size}"; `{0}` is the
            generator, whose options are fields.
    """

    game: ClassVar[str]
    name_format: ClassVar[str]

    @property
    def name(self) -> str:
        """Name of the data source, under which results are reported."""
        return self.name_format.format(self)

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Draw a random solvable puzzle; return it as the game shows it.

        Args:
            random: source of randomness.
            owns: returns True if the split may have puzzles with a key; called as soon as the key
                is known.

        Returns:
            The puzzle; None if this draw has no solvable puzzle, or if `owns` returns False.
        """

    def all_puzzles(self) -> Sequence[tuple[str, str]] | None:
        """Return (key, puzzle) of every puzzle in a fixed order; None if there are too many to list."""
        return None

    def slip(self, random: Random, actions: str) -> str:
        """Return a solution with one action replaced by a random other one.

        Demonstrations contain such mistakes on purpose, so that a policy that imitates them still
        has something to learn. A few of the lists solve the puzzle nevertheless: in Blocksworld, a
        block that has to be put aside may often be put on one of several places.

        Args:
            random: source of randomness.
            actions: a list of actions that solves a puzzle.
        """


def replace_one(random: Random, actions: str, pattern: str, alphabet: Sequence[str]) -> str:
    """Replace a random match of `pattern` in a list of actions by a random other word of `alphabet`."""
    match = random.choice(list(re.finditer(pattern, actions)))
    replacement = random.choice([word for word in alphabet if word != match[0]])
    return actions[: match.start()] + replacement + actions[match.end() :]
