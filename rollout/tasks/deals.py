"""Deals of zero-sum games as tasks, and demonstrations by players that choose at random."""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import count, islice
from random import Random
from typing import Any

from rollout.environments import ENVS
from rollout.environments.games import ZERO_SUM_GAMES
from rollout.environments.games.best_response import information_sets
from rollout.orchestras.duel import duel
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks.splits import draw_listed
from rollout.tasks.teaching import TeachingSession
from rollout.teams.roles import Role


def deal_tasks(game: str, seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different deals for each split.

    The splits are drawn from the same deals and overlap, because a game is learned against an
    opponent and not from examples: there is nothing in a deal to memorise.
    """
    deals = list(ZERO_SUM_GAMES[game]().deals())
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, game, split))
        for deal in draw_listed(game, split, size, deals, random):
            tasks.append(_deal_task(game, deal, split))
    return tasks


def _deal_task(game: str, deal: str, split: str) -> Task:
    return Task(
        id=f"{game}/{split}/{deal.replace(' ', '')}",
        prompt=deal,
        answers=(),
        env=game,
        source=game,
        split=split,
    )


def deal_demonstrations(
    game: str, seed: int, n: int, *, roles: Mapping[str, Role]
) -> Iterator[Demonstration]:
    """Yield `n` turns of games in which both players choose a legal action at random.

    A policy that imitates them perfectly plays the uniform strategy.

    Args:
        game: name of the game.
        seed: seed of the run.
        n: number of turns.
        roles: the roles as the rollout will use them, by agent name.
    """
    deals = list(ZERO_SUM_GAMES[game]().deals())

    def all_turns() -> Iterator[Demonstration]:
        for episode in count():
            random = Random(derive_seed(seed, game, "demonstration", episode))
            task = _deal_task(game, random.choice(deals), "train")
            player = _RandomPlayer(game, roles, random)
            env: Any = ENVS[game](task)
            asyncio.run(duel(task, player, env))
            yield from player.demonstrations

    return islice(all_turns(), n)


class _RandomPlayer(TeachingSession):
    """Both players of a game, who choose every legal action with equal probability."""

    def __init__(self, game: str, roles: Mapping[str, Role], random: Random) -> None:
        super().__init__(roles, {}, random)
        self._actions = information_sets(ZERO_SUM_GAMES[game]())

    def reply_of(self, agent: str, slots: Mapping[str, object]) -> str:
        """Return a random legal action."""
        return self._random.choice(self._actions[agent, str(slots["state"])])
