"""A section of a config: a frozen pydantic model that refuses unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a config: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
