"""Estimated workload of a training step: the most turns of each policy, and their assumed mean length."""

from dataclasses import dataclass
from statistics import fmean

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy

# Assumed, as no formula gives them; not measured.
MEAN_REPLY_SHARE = 0.5  # share of `max_tokens` that a mean reply takes
MEAN_PROMPT_SHARE = 0.25  # share of the longest possible prompt that a mean prompt takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Turns of one policy in a training step, and the length of a mean turn."""

    turns: float
    prompt_tokens: float
    reply_tokens: float

    @property
    def tokens(self) -> float:
        """Tokens of all turns; a prefix that several turns share is counted for each of them."""
        return self.turns * (self.prompt_tokens + self.reply_tokens)


def estimate_workloads(config: RunConfig) -> dict[str, Workload]:
    """Estimate the turns and tokens of each policy in one training step.

    The number of turns is an upper bound: every agent is assumed to speak in every round that its
    orchestra allows. The number of tokens is not, because it assumes a mean length of a turn.

    Returns:
        Workload of each policy that an agent or an opponent plays, by name.
    """
    return {policy: _policy_workload(config, policy) for policy in config.played}


def _policy_workload(config: RunConfig, policy: str) -> Workload:
    names = [name for name, agent in config.agents.items() if agent.policy == policy]
    # An opponent has no agent of its own, and may play each of them.
    names = names or list(config.agents)
    agents = [config.agents[name] for name in names]
    max_length = for_policy(config, policy).engine.max_length
    prompt_budgets = [max(0, max_length - agent.max_tokens) for agent in agents]
    turns_per_round = sum(1 + _alternatives(config, name) for name in names)
    return Workload(
        turns=_trajectories_per_step(config) * _rounds(config) * turns_per_round,
        prompt_tokens=MEAN_PROMPT_SHARE * fmean(prompt_budgets),
        reply_tokens=MEAN_REPLY_SHARE * fmean(agent.max_tokens for agent in agents),
    )


def _trajectories_per_step(config: RunConfig) -> float:
    trainer = config.trainer
    branches = trainer.branching.width if trainer.branching is not None else 1
    return trainer.tasks_per_step * trainer.group_size * trainer.oversample * branches


def _alternatives(config: RunConfig, agent: str) -> int:
    """Return the largest number of alternatives of a turn of an agent."""
    replays = config.trainer.replays
    return replays.alternatives if replays and agent in config.replayed_agents else 0


def _rounds(config: RunConfig) -> float:
    """Return the most rounds of a trajectory, by the options of the orchestra.

    Every agent has one turn in a round.
    """
    options = config.orchestra.options
    if options.get("max_nodes"):  # the nodes of a search tree are shared by all agents
        return float(options["max_nodes"]) / len(config.agents)
    rounds = [options.get(name) or 1 for name in ("max_turns", "max_loops", "rounds")]
    return float(max(rounds))
