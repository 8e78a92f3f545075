"""Sections of a config about credit: credited agents and losses."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.equations.corrections import CORRECTIONS
from mcore_mas.equations.kl import KLName
from mcore_mas.equations.losses import AGGREGATIONS, LOSSES, AggregationName
from mcore_mas.equations.turns import Grouping
from rollout.base.options import Registry
from rollout.base.section import Section
from rollout.config.agents import AgentConfig
from rollout.config.choice import Choice


class CreditedAgentConfig(AgentConfig):
    """An agent and the credit that it gets."""

    # Advantage estimator of the agent; None: the run's estimator.
    advantage: AdvantageConfig | None = None
    # Factor of the loss of the agent's turns; 0: they are not trained, but other turns are still compared with them.
    loss_weight: float = Field(1.0, ge=0)


class KLConfig(Section):
    """Regularization towards the model that the policy starts from, in the loss or in the reward."""

    # Coefficient of the KL divergence, or its first value with `target`; 0: no reference model is kept.
    coef: float = Field(0.0, ge=0)
    estimate: KLName = "k3"
    where: Literal["loss", "reward"] = "loss"
    # Nats per token that an adaptive coefficient aims at; None: the coefficient is fixed.
    target: float | None = Field(None, gt=0)
    # Number of samples after which the adaptive coefficient has changed by about 20 %, if the KL is far from target.
    horizon: float = Field(10_000.0, gt=0)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target is not None and not self.coef:
            raise ValueError(
                "an adaptive coefficient starts above 0; set coef, or leave target out"
            )
        return self


class CorrectionConfig(Choice):
    """Importance weights of tokens that correct the mismatch between the sampling and the training policy."""

    registry = Registry(
        kind="correction",
        registered=CORRECTIONS,
        takes=("log_ratio", "sequences"),
        importable=False,
    )

    name: str = "none"


class LossConfig(Choice):
    """The objective of an update."""

    registry = Registry(kind="loss", registered=LOSSES, takes=("tokens", "old"), importable=False)

    aggregation: AggregationName = "token_mean"
    # Length in tokens, for aggregations that divide by a constant length.
    norm: float | None = Field(None, gt=0)
    # Coefficient of the entropy bonus.
    entropy: float = Field(0.0, ge=0)
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    # π_old of a correction: the trainer's policy with its weights at the "start" of the step, or with those that
    # "sampled" each token.
    old_policy: Literal["start", "sampled"] = "start"
    # "agents": rescale the gradients of a policy's agents, so that their norms are in proportion to the loss weights.
    balance: Literal["none", "agents"] = "none"
    # "effective_samples": multiply the learning rate of an update by √(effective sample size / number of replies).
    lr_scale: Literal["none", "effective_samples"] = "none"

    @model_validator(mode="after")
    def _check_old_policy(self) -> Self:
        if self.old_policy == "sampled" and self.correction.name == "none":
            raise ValueError(
                "old_policy 'sampled' needs a correction that the config sets, such as correction.name: tis (the "
                "default correction of runs outside float32 does not count); without one, the loss uses the engine's "
                "log-probabilities as those of the old policy, and old_policy has no effect"
            )
        return self

    @model_validator(mode="after")
    def _check_norm(self) -> Self:
        needs_norm = AGGREGATIONS[self.aggregation].normed
        if needs_norm and self.norm is None:
            raise ValueError(f"aggregation '{self.aggregation}' needs norm, a length in tokens")
        if self.norm is not None and not needs_norm:
            raise ValueError(
                f"aggregation '{self.aggregation}' does not divide by a constant; leave norm out"
            )
        return self

    @property
    def scores_with_sampling_weights(self) -> bool:
        """True if the trainer computes π_old of each token with the weights that sampled it."""
        return self.old_policy == "sampled"


def truncated_sampling_warning(agents: Mapping[str, CreditedAgentConfig]) -> str:
    """Return a warning about trained agents that sample with top_p or top_k, or "" if there are none."""
    truncated = [
        name
        for name, agent in agents.items()
        if agent.loss_weight and (agent.top_p < 1 or agent.top_k)
    ]
    if not truncated:
        return ""
    return (
        f"agents {', '.join(truncated)} train on replies drawn with top_p or top_k: the gradient is that of the "
        "whole distribution, and nothing corrects for the part that was cut off; for an unbiased gradient set "
        "top_p=1 and top_k=0"
    )


def check_vote_sources(name: str, grouping: Grouping | None, sources: frozenset[str]) -> None:
    """Refuse an estimator or filter if a run has no trajectories or branches that it can compare.

    Turns of one trajectory are not enough, because most rewards pay them equally.

    Args:
        name: the estimator or filter, as the error names it.
        grouping: its peers and votes; None if it compares no turns.
        sources: mechanisms that this run has, by their names in `Grouping.vote_sources`.

    Raises:
        ValueError: the run has none of the mechanisms of the grouping.
    """
    if grouping is None or grouping.vote_sources & sources:
        return
    remedies = {
        "groups": "set trainer.group_size to 2 or more",
        "states": "take an environment that names its state, and a trainer.group_size of 2 or more",
        "trees": "set trainer.branching, of width 2 or more",
    }
    ways_out = [*(remedies[source] for source in sorted(grouping.vote_sources)), "choose another"]
    raise ValueError(
        f"{name} compares turns of the same {', '.join(grouping.peer_columns)}, with one vote for each "
        f"{', '.join(grouping.vote_columns)}: this run has no trajectories or branches to compare in this way; "
        f"{', or '.join(ways_out)}"
    )
