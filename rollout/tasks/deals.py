"""Deals of zero-sum games as tasks, and demonstrations by players that choose at random."""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import count, islice
from random import Random
from typing import Annotated, Any

from pydantic import Field

from rollout.environments import ENVS
from rollout.environments.games import ZERO_SUM_GAMES
from rollout.environments.games.best_response import Strategy, information_sets
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
    game: str,
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> Iterator[Demonstration]:
    """Yield `n` turns of games in which both players choose a legal action at random.

    Args:
        game: name of the game.
        seed: seed of the run.
        n: number of turns.
        roles: the roles as the rollout will use them, by agent name.
        spread: difference between the information sets. 0: all legal actions are equally likely
            everywhere. Above 0, the weight of each action is drawn once for each information set,
            between 1 - spread and 1 + spread, so that a policy which imitates the games reads what
            it has seen, but plays no better for it.
    """
    strategy = random_strategy(game, seed, spread)
    deals = list(ZERO_SUM_GAMES[game]().deals())

    def all_turns() -> Iterator[Demonstration]:
        for episode in count():
            random = Random(derive_seed(seed, game, "demonstration", episode))
            task = _deal_task(game, random.choice(deals), "train")
            player = _RandomPlayer(strategy, roles, random)
            env: Any = ENVS[game](task)
            asyncio.run(duel(task, player, env))
            yield from player.demonstrations

    return islice(all_turns(), n)


def random_strategy(game: str, seed: int, spread: float) -> Strategy:
    """Return the strategy of the demonstrations, by information set; `spread` is explained there."""
    strategy = {}
    for (player, observation), actions in information_sets(ZERO_SUM_GAMES[game]()).items():
        random = Random(derive_seed(seed, game, "strategy", player, observation))
        weights = {action: random.uniform(1 - spread, 1 + spread) for action in actions}
        total = sum(weights.values())
        strategy[player, observation] = {
            action: weight / total for action, weight in weights.items()
        }
    return strategy


class _RandomPlayer(TeachingSession):
    """Both players of a game, who draw their actions from a strategy."""

    def __init__(self, strategy: Strategy, roles: Mapping[str, Role], random: Random) -> None:
        super().__init__(roles, {}, random)
        self._strategy = strategy

    def reply_of(self, agent: str, slots: Mapping[str, object]) -> str:
        """Return a random legal action."""
        probabilities = self._strategy[agent, str(slots["state"])]
        return self._random.choices(list(probabilities), list(probabilities.values()))[0]
