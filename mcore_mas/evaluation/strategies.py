"""Strategies of a team in a zero-sum game, measured exactly from the probabilities of its replies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mcore_mas.config.run import RunConfig
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.deadlines import LateCall, with_deadline
from rollout.base.errors import EngineError
from rollout.engines import EngineClient
from rollout.environments.games.best_response import (
    InformationSet,
    expected_payoff,
    exploitability,
    information_sets,
)
from rollout.environments.games.zero_sum import PLAYERS, ZeroSumEnv, ZeroSumGame
from rollout.teams.roles import Agent
from rollout.teams.team import Team

# Number of the likeliest tokens that an engine reports. A token that is not among them counts as
# impossible.
_CANDIDATES = 4096


def game_of(config: RunConfig) -> ZeroSumGame[Any] | None:
    """Return the zero-sum game that a run's agents play against each other; None without one."""
    env = config.env.registry.find(config.env.name)
    if config.orchestra.name != "duel" or not isinstance(env, type):
        return None
    return env.game() if issubclass(env, ZeroSumEnv) else None


async def strategy_metrics(team: Team, game: ZeroSumGame[Any]) -> dict[str, float]:
    """Measure the strategy of a team in a game.

    Returns:
        `exploitability`; `value`, the expected payoff of the first player; and `legal_probability`,
        the probability that a reply is a legal action, as a mean over the information sets. The
        first two describe the strategy given that replies are legal. Empty if there is an agent whose
        replies cannot be scored: it is behind an API, or its replies are not the actions themselves.

    Raises:
        EngineError: an engine does not report the likeliest tokens.
    """
    information = information_sets(game)
    actions = {action for legal in information.values() for action in legal}
    if not all(_can_score(team, team.agents[player], actions) for player in PLAYERS):
        return {}

    replies = await reply_probabilities(team, game, information)
    strategy = {}
    for information_set, probabilities in replies.items():
        total = sum(probabilities.values())
        strategy[information_set] = {
            # A policy without any legal reply is taken to choose at random.
            action: probability / total if total else 1 / len(probabilities)
            for action, probability in probabilities.items()
        }
    return {
        "exploitability": exploitability(game, strategy),
        "value": expected_payoff(game, strategy),
        "legal_probability": fmean(sum(row.values()) for row in replies.values()),
    }


async def reply_probabilities(
    team: Team, game: ZeroSumGame[Any], information: Mapping[InformationSet, Sequence[str]]
) -> dict[InformationSet, dict[str, float]]:
    """Return the probability of every legal action as a whole reply, in every information set.

    Replies are scored and not sampled: the engine reports the log-probability of each of their
    tokens, and of the stop token, at the temperature of the agent. `top_p` and `top_k` are not applied.

    Args:
        team: agents, whose policies are engines.
        game: the game.
        information: legal actions in each information set.

    Raises:
        EngineError: an engine does not report the likeliest tokens.
    """

    async def score(information_set: InformationSet, legal: Sequence[str]) -> dict[str, float]:
        player, observation = information_set
        agent = team.agents[player]
        client = team.policies[agent.policy]
        assert isinstance(client, EngineClient), "checked by _can_score"
        prompt_ids = client.renderer.render(
            agent.role.messages(problem=game.about, state=observation)
        )
        probabilities = dict.fromkeys(legal, 1.0)
        next_tokens: dict[tuple[int, ...], dict[int, float]] = {}  # by tokens of the reply so far
        for action in legal:
            reply_ids = client.renderer.encode_reply(action)
            for position, token in enumerate(reply_ids):
                prefix = reply_ids[:position]
                if prefix not in next_tokens:
                    next_tokens[prefix] = await _next_token_logprobs(
                        client, agent, (*prompt_ids, *prefix)
                    )
                if token not in next_tokens[prefix]:
                    probabilities[action] = 0.0
                    break
                probabilities[action] *= math.exp(next_tokens[prefix][token])
        return probabilities

    rows = await gather_or_cancel(score(key, legal) for key, legal in information.items())
    return dict(zip(information, rows, strict=True))


async def _next_token_logprobs(
    client: EngineClient, agent: Agent, token_ids: Sequence[int]
) -> dict[int, float]:
    """Return the log-probabilities of the likeliest next tokens at the agent's temperature."""
    sampling = replace(agent.sampling, max_tokens=1, candidates=_CANDIDATES)
    async with client.slots:
        generation = client.engine.generate(token_ids, sampling)
        completion = await with_deadline(client.deadline_s, generation, LateCall)
    if not completion.candidates:
        raise EngineError(
            f"policy {agent.policy}: its engine reported no likeliest tokens (finish reason "
            f"'{completion.finish_reason}'), by which the strategy is measured; an engine must fill "
            "`Completion.candidates` if `Sampling.candidates` is above 0"
        )
    return dict(completion.candidates[0])


def _can_score(team: Team, agent: Agent, actions: set[str]) -> bool:
    """Return True if an agent's actions have probabilities that can be computed.

    An engine must play the agent, and its parser must return each action unchanged.
    """
    is_engine = isinstance(team.policies[agent.policy], EngineClient)
    return is_engine and all(agent.role.parse(action) == action for action in actions)
