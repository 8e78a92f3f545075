"""Puzzles (games) as tasks, and demonstrations by a teacher that solves them and slips."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from random import Random
from typing import Any

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.environments import ENVS
from rollout.environments.games import GAMES
from rollout.environments.games.game import Owns, PuzzleSource
from rollout.orchestras.acting import game_team, single
from rollout.orchestras.replies import FINAL_ACTIONS, PROPOSED_ACTIONS
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks.splits import content_digest, draw_different, draw_listed, split_of
from rollout.tasks.teaching import TeachingSession
from rollout.teams.roles import Role

# Default probabilities of slips by agent.
PLAYER_SLIPS: Mapping[str, float] = {"tool": 0.5, "planner": 0.5, "player": 0.5}


def draw_puzzle_tasks(source: PuzzleSource, seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different puzzles for each split; all puzzles of one key are in one split."""
    all_puzzles = source.all_puzzles()
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, source.name, split))
        if all_puzzles is None:
            draw = partial(source.draw, random, _belongs_to(split))
            puzzles = draw_different(source.name, split, size, draw)
        else:
            candidates = [puzzle for key, puzzle in all_puzzles if split_of(key) == split]
            puzzles = draw_listed(source.name, split, size, candidates, random)
        tasks += [puzzle_task(source, puzzle, split) for puzzle in puzzles]
    return tasks


def _belongs_to(split: str) -> Owns:
    """Return a function that returns True for keys of a split."""
    return lambda key: split_of(key) == split


def puzzle_task(source: PuzzleSource, puzzle: str, split: str) -> Task:
    """Convert a puzzle to a task; its id has a digest of the text, and its answer is a solution."""
    game = GAMES[source.game]()
    solution = game.solve(game.read(puzzle))
    assert solution is not None, f"{source.name} drew a puzzle without a solution:\n{puzzle}"
    return Task(
        id=f"{source.name}/{content_digest(puzzle)}",
        prompt=puzzle,
        answers=(solution,),
        env=source.game,
        source=source.name,
        split=split,
    )


def puzzle_demonstrations(
    make_source: Callable[..., PuzzleSource],
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    slips: Mapping[str, Share] = PLAYER_SLIPS,
    max_turns: PositiveInt = 2,
    **options: Any,
) -> Iterator[Demonstration]:
    """Yield `n` turns on training puzzles, in the order in which they were spoken.

    Roles `tool` and `planner` play the orchestra `game_team`, a role `player` plays `single`. If
    the tool agent or the player slips, it replaces one action of a solution at random; if the
    planner slips, it passes a proposal on unread. A policy that imitates them perfectly writes
    well-formed replies, but is often wrong: by default about half of the proposals are wrong, and
    half of those are taken.

    Args:
        make_source: makes the source of puzzles from the options.
        seed: seed of the run.
        n: number of turns.
        roles: the roles as the rollout will use them, by agent name.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        max_turns: maximum number of steps of a puzzle, as in a rollout.
        options: options of the source.
    """
    source = make_source(**options)
    orchestra = game_team if "planner" in roles else single

    def all_turns() -> Iterator[Demonstration]:
        for episode in count():
            random = Random(derive_seed(seed, source.name, "demonstration", episode))
            puzzle = source.draw(random, _belongs_to("train"))
            if puzzle is None:
                continue
            task = puzzle_task(source, puzzle, "train")
            teacher = _PuzzleTeacher(source, task, roles, slips, random)
            # Any, because the orchestra also calls `preview`, which `Env` lacks.
            env: Any = ENVS[source.game](task, max_turns=max_turns)
            asyncio.run(orchestra(task, teacher, env, max_turns=max_turns))
            yield from teacher.demonstrations

    return islice(all_turns(), n)


class _PuzzleTeacher(TeachingSession):
    """Team that knows a solution from any state of a puzzle."""

    def __init__(
        self,
        source: PuzzleSource,
        task: Task,
        roles: Mapping[str, Role],
        slips: Mapping[str, float],
        random: Random,
    ) -> None:
        super().__init__(roles, slips, random)
        self._source = source
        self._game: Any = GAMES[source.game]()
        self._state = self._game.read(task.prompt)

    def reply_of(self, agent: str, slots: Mapping[str, object]) -> str:
        """Return the actions that an agent proposes or decides on; play those that are decided on."""
        actions = self._actions_of(agent, str(slots.get("proposal", "")))
        if agent == "tool":
            return f"{PROPOSED_ACTIONS} {actions}"
        self._state = self._game.play(self._state, actions).state
        return f"{FINAL_ACTIONS} {actions}"

    def _actions_of(self, agent: str, proposal: str) -> str:
        """Return an agent's actions.

        Args:
            agent: name of the agent.
            proposal: actions that another agent proposes to this one; "" without one.
        """
        solution: str | None = self._game.solve(self._state)
        if solution is None:
            # An earlier slip has made the puzzle unsolvable.
            return proposal or self._random.choice("UDLR")
        if not self.slips(agent):
            return solution
        return proposal or self._source.slip(self._random, solution)
