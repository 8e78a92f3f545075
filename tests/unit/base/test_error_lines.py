"""A refused value is reported with its key, pydantic's message and the value."""

import math
import time
from typing import Any, Literal

import pytest
from pydantic import Field, NonNegativeInt, ValidationError, model_validator
from pydantic_core import to_json

from rollout.base.error_lines import error_below, error_line
from rollout.base.section import Section


class Agent(Section):
    role: str
    temperature: float = Field(1.0, ge=0)


class Trainer(Section):
    steps: int = Field(ge=1)
    order: Literal["first", "last"] = "first"
    files: NonNegativeInt | tuple[str, ...] = 0

    @model_validator(mode="after")
    def _check_order(self) -> "Trainer":
        if self.order == "last" and self.steps == 1:
            raise ValueError("one step has no last; set order: first")
        return self


class Run(Section):
    trainer: Trainer
    agents: dict[str, Agent] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


def line(values: dict[str, Any], prefix: str = "") -> str:
    with pytest.raises(ValidationError) as refused:
        Run.model_validate_json(to_json(values, inf_nan_mode="constants"), strict=True)
    return error_line(refused.value, Run, values, prefix=prefix)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"trainer": {"steps": "5"}},
            'trainer.steps: Input should be a valid integer (got "5")',
        ),
        ({"trainer": {}}, "trainer.steps: Field required"),
        ({"trainer": None}, "trainer: Input should be an object (got null)"),
        (
            {"trainer": {"steps": 1, "order": "last"}},
            "trainer: one step has no last; set order: first",
        ),
        (
            {"trainer": {"steps": 1, "files": "x"}},
            "trainer.files: Input should be a valid integer, or input should be a valid array "
            '(got "x")',
        ),
        (
            {"trainer": {"steps": 1}, "agents": {"solver": {"role": "r", "temperature": math.inf}}},
            "agents.solver.temperature: Input should be a finite number (got Infinity)",
        ),
        (
            {"trainer": {"steps": 0}, "agents": {"solver": {"role": 3}}},
            "trainer.steps: Input should be greater than or equal to 1 (got 0); "
            "agents.solver.role: Input should be a valid string (got 3)",
        ),
    ],
)
def test_every_refused_value_is_named_once(values: dict[str, Any], expected: str) -> None:
    assert line(values) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"trainer": {"steps": 1, "stesp": 2}},
            "trainer.stesp: unknown key; nearest: steps",
        ),
        (
            {"trainer": {"steps": 1}, "agents": {"solver": {"role": "r", "rloe": "r"}}},
            "agents.solver.rloe: unknown key; nearest: role",
        ),
        (
            {"trainer": {"steps": 1, "x": 2}},
            "trainer.x: unknown key; known here: steps, order, files",
        ),
        ({"trainer": {"steps": 1}, "order": 3}, "order: unknown key; write trainer.order"),
        (
            {"trainer": {"steps": 1}, "temperature": 3},
            "temperature: unknown key; write agents.*.temperature",
        ),
    ],
)
def test_an_unknown_key_has_its_nearest_or_its_section(
    values: dict[str, Any], expected: str
) -> None:
    assert line(values) == expected


def test_a_part_of_a_config_is_named_with_its_key() -> None:
    expected = "policies.a.trainer.steps: Field required"
    assert line({"trainer": {}}, prefix="policies.a") == expected


def test_the_errors_of_a_part_can_be_moved_below_its_keys() -> None:
    with pytest.raises(ValidationError) as refused:
        Trainer.model_validate({"steps": 0})
    moved = error_below(refused.value, Trainer, ("trainer",))
    assert error_line(moved, Run, {"trainer": {"steps": 0}}) == (
        "trainer.steps: Input should be greater than or equal to 1 (got 0)"
    )


def test_an_unknown_key_of_a_part_has_its_nearest() -> None:
    with pytest.raises(ValidationError) as refused:
        Trainer.model_validate({"steps": 1, "ordre": "first"})
    moved = error_below(refused.value, Trainer, ("options",))
    assert error_line(moved, Run, {"options": {"ordre": "first"}}) == (
        "options.ordre: unknown key; nearest: order"
    )


def test_a_long_value_is_cut() -> None:
    assert line({"trainer": {"steps": "x" * 500}}).endswith("x…)")


def test_ten_of_many_wrong_keys_are_named_in_a_moment() -> None:
    values = {f"k{number}": 1 for number in range(100_000)}
    started = time.process_time()
    text = line({"trainer": {"steps": 1, **values}})
    assert time.process_time() - started < 10
    assert text.startswith("trainer.k0: unknown key")
    assert text.endswith("; and 99990 other keys are wrong")
    assert text.count("unknown key") == 10


def test_many_wrong_keys_of_a_part_take_a_moment() -> None:
    values = {f"k{number}": 1 for number in range(100_000)}
    with pytest.raises(ValidationError) as refused:
        Trainer.model_validate({"steps": 1, **values})
    started = time.process_time()
    moved = error_below(refused.value, Trainer, ("trainer",))
    text = error_line(moved, Run, {"trainer": values})
    assert time.process_time() - started < 10
    assert text.endswith("; and 99990 other keys are wrong")


def test_a_key_with_a_line_break_is_one_line() -> None:
    assert "trainer.a\\nb: unknown key" in line({"trainer": {"a\nb": 1}})


def test_a_long_key_is_cut() -> None:
    text = line({"trainer": {"steps": 1, "x" * 10**6: 1}})
    assert text.startswith("trainer.xxx")
    assert len(text) < 500
