"""Removed keys are refused with one line that says what replaces them."""

from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.removed import removed_key_error
from mcore_mas.config.run import ConfigError

REMOVED = {
    "trainer.pace": "use trainer.staleness",
    "policies.*.shape": "use tp and dp",
    "engine.transport=morse": "use engine.transport: disk",
    "tracking.further_trackers=pigeon": "use wandb",
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"trainer": {"pace": 1}}, "trainer.pace was removed: use trainer.staleness"),
        (
            {"policies": {"a": {}, "b": {"shape": None}}},
            "policies.b.shape was removed: use tp and dp",
        ),
        (
            {"engine": {"transport": "morse"}},
            "engine.transport: morse was removed: use engine.transport: disk",
        ),
        (
            {"policies": {"a": {"overrides": {"engine": {"transport": "morse"}}}}},
            "policies.a.overrides.engine.transport: morse was removed: use engine.transport: disk",
        ),
        (
            {"tracking": {"further_trackers": ["wandb", "pigeon"]}},
            "tracking.further_trackers: pigeon was removed: use wandb",
        ),
        ({"engine": {"transport": "disk"}, "policies": {"a": None}, "tracking": 3}, ""),
    ],
)
def test_names_the_removed_key_and_its_replacement(values: dict[str, Any], expected: str) -> None:
    assert removed_key_error(values, REMOVED) == expected


def test_a_removed_key_in_an_override_is_refused_before_validation() -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer\.logprob_tolerance was removed: bound the figures under trainer\.agreement",
    ):
        resolve(["experiment=demo_math", "trainer.logprob_tolerance=1e-3", "seed=text"])


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("embedded_local", "write engine.name: embedded"),
        ("embedded_replicas", "write engine.name: embedded, and engine.replicas"),
    ],
)
def test_a_removed_engine_is_refused_with_its_replacement(name: str, replacement: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.name: {name} was removed: {replacement}$"):
        resolve(["experiment=demo_math", f"engine.name={name}"])


@pytest.mark.parametrize(
    ("experiment", "override", "expected"),
    [
        (
            "demo_math",
            "advantage.eps=1e-5",
            "advantage.eps was removed: write advantage.options.eps",
        ),
        (
            "demo_math",
            "advantage.lone=raw",
            "advantage.lone was removed: write advantage.options.lone",
        ),
        ("demo_math", "cold_start.betas=[0.9,0.98]", "cold_start.betas was removed: leave it out"),
        (
            "demo_search",
            "retriever.url=http://127.0.0.1:8000",
            "retriever.url was removed: write retriever.urls, a list",
        ),
    ],
)
def test_a_key_of_the_first_release_is_refused_with_its_replacement(
    experiment: str, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve([f"experiment={experiment}", f"+{override}"])
