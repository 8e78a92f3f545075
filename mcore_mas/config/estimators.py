"""Sections of a config about the turns of a step: the advantage estimator and the filter.

They import no part of a team, so that `mcore-mas explain` starts fast.
"""

from pydantic import Field

from mcore_mas.equations.advantages import ESTIMATORS
from mcore_mas.equations.filters import FILTERS
from rollout.base.options import Registry
from rollout.config.choice import Choice


class AdvantageConfig(Choice):
    """The estimator that turns rewards into advantages."""

    registry = Registry(kind="advantage", registered=ESTIMATORS, takes=("turns",))

    # Turns per task that train, for each agent: surplus turns are dropped, and if there are too few, some count more
    # than once (M-GRPO). None: every turn trains once.
    align: int | None = Field(None, ge=1)


class FilterConfig(Choice):
    """The rule that selects the turns that train."""

    registry = Registry(kind="filter", registered=FILTERS, takes=("turns",))

    # Further batches of tasks that a step may collect to replace filtered turns.
    resample: int = Field(0, ge=0)
