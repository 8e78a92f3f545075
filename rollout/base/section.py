"""Base classes of config sections, and types that several sections and options share."""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo


class Section(BaseModel):
    """A section of a config: unknown keys are refused, and values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class StrictSection(Section):
    """A section whose values are not converted: text is not a number; a whole number may stand for a float."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


def _check_above_low(high: float, info: ValidationInfo) -> float:
    low = info.data.get("low", -math.inf)
    if high <= low:
        raise ValueError(f"expected a number above low, which is {low:g}")
    return high


def _check_distinct(names: Sequence[str]) -> Sequence[str]:
    if len(set(names)) < len(names):
        raise ValueError("expected a list of different names")
    return names


Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[
    Sequence[str],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_check_distinct),
]
# A number above the option `low`, which must be declared before it.
AboveLow = Annotated[float, Field(validate_default=True), AfterValidator(_check_above_low)]
