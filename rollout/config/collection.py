"""Section of a config about collection: deadlines, and how many trajectories may be lost."""

import itertools
from typing import Self

from pydantic import Field, model_validator

from rollout.teams.collect import Deadlines


class CollectionConfig(Deadlines):
    """Deadlines of a collection in seconds (None: no deadline), and bounds on failed trajectories and answers."""

    # Seconds in which no call and no trajectory ends, after which the log says what each trajectory waits for.
    stall_s: float | None = Field(120.0, gt=0)
    # Share of an agent's answers that may stay without a verdict; above it, they count as wrong.
    max_undecided: float = Field(0.05, ge=0, le=1)
    # Share of a step's trajectories that may be lost to errors in the code of team, environment or tool; above it, the
    # run ends.
    max_quarantined: float = Field(0.25, ge=0, le=1)

    @model_validator(mode="after")
    def _check_nesting(self) -> Self:
        deadlines = ("call_s", "tool_s", "trajectory_s", "batch_s")
        for inner_key, outer_key in itertools.combinations(deadlines, 2):
            if outer_key == "tool_s":  # a call of an engine is not inside a call of a tool
                continue
            inner = getattr(self, inner_key)
            outer = getattr(self, outer_key)
            if inner is not None and outer is not None and inner > outer:
                raise ValueError(
                    f"{inner_key} {inner:g} has no effect, because {outer_key} {outer:g} is over before; lower it, "
                    "or leave it out"
                )
        return self
