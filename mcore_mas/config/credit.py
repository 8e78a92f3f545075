"""Credit sections of a config: advantage estimators, filters and losses."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from mcore_mas.equations.advantages import ESTIMATORS
from mcore_mas.equations.divergence import CORRECTIONS, KLName
from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.losses import AGGREGATIONS, LOSSES, AggregationName
from mcore_mas.equations.turns import Grouping
from rollout.base.options import Registry
from rollout.base.section import Section
from rollout.config.sections import AgentConfig, Choice


class AdvantageConfig(Choice):
    """How rewards become advantages."""

    registry = Registry(kind="advantage", known=ESTIMATORS, takes=("turns",))

    align: int | None = Field(
        None, ge=1
    )  # turns per task and agent that train, the rest dropped or repeated (M-GRPO)


class CreditedAgentConfig(AgentConfig):
    """An agent with the credit it gets."""

    advantage: AdvantageConfig | None = None  # None: the run's
    loss_weight: float = Field(
        1.0, ge=0
    )  # 0 freezes the agent: its turns count as peers, and do not train


class FilterConfig(Choice):
    """Which turns train."""

    registry = Registry(kind="filter", known=FILTERS, takes=("turns",))

    resample: int = Field(
        0, ge=0
    )  # further batches of tasks that a step may collect to fill up what was left out


class KLConfig(Section):
    """Staying near the policy's first model, by a term in the loss or a penalty in the reward."""

    coef: float = Field(0.0, ge=0)  # 0: no reference is kept
    estimate: KLName = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: float | None = Field(
        None, gt=0
    )  # nats per token that an adaptive coefficient steers to; None: fixed
    horizon: float = Field(10_000.0, gt=0)  # samples, of the adaptive coefficient

    @model_validator(mode="after")
    def _starts(self) -> Self:
        if self.target is not None and not self.coef:
            raise ValueError(
                "an adaptive coefficient starts above 0; set coef, or leave target out"
            )
        return self


class CorrectionConfig(Choice):
    """What the mismatch between sampler and trainer does to a token's weight."""

    registry = Registry(
        kind="correction", known=CORRECTIONS, takes=("log_ratio", "sequences"), own=False
    )

    name: str = "none"


class LossConfig(Choice):
    """What an update minimises."""

    registry = Registry(kind="loss", known=LOSSES, takes=("tokens", "old"), own=False)

    aggregation: AggregationName = "token_mean"
    norm: float | None = Field(
        None, gt=0
    )  # tokens, for aggregations that divide by a constant length
    entropy: float = Field(0.0, ge=0)  # factor of the entropy bonus
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="after")
    def _normed(self) -> Self:
        normed = AGGREGATIONS[self.aggregation].normed
        if normed != (self.norm is not None):
            what = (
                "needs norm, a length in tokens"
                if normed
                else "divides by no constant; leave norm out"
            )
            raise ValueError(f"aggregation '{self.aggregation}' {what}")
        return self


def cut_off(agents: Mapping[str, CreditedAgentConfig]) -> list[str]:
    """A line on the agents that train on replies from a cut distribution; nothing for none."""
    cut = [
        name
        for name, agent in agents.items()
        if agent.loss_weight and (agent.top_p < 1 or agent.top_k)
    ]
    return [
        f"agents {', '.join(cut)} train on replies drawn with top_p or top_k: the gradient is that of the whole "
        "distribution, and nothing corrects for what was cut off; for an unbiased one set top_p=1 and top_k=0"
    ][: len(cut)]


def check_contrast(what: str, groups: Grouping | None, there: frozenset[str]) -> None:
    """Refuse groups in which a run makes one vote each, so that nothing differs and nothing is learned.

    Args:
        what: compares them, as the error names it.
        groups: None where nobody is compared.
        there: what makes turns of a task differ in the run, as `Grouping.contrast` names it.

    Raises:
        ValueError: every group has one vote.
    """
    if groups is None or groups.contrast & there:
        return
    ways = {
        "groups": "set trainer.group_size to 2 or more",
        "states": "take an environment that names its state, and a trainer.group_size of 2 or more",
        "trees": "set trainer.branching, of width 2 or more",
    }
    raise ValueError(
        f"{what} compares turns alike in {', '.join(groups.peers)}, and a vote is {', '.join(groups.vote)}: this run "
        f"makes one vote of each, from which nothing can be learned; "
        f"{', or '.join([*(ways[way] for way in sorted(groups.contrast)), 'choose another'])}"
    )
