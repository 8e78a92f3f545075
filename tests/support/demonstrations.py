"""Demonstrations of the shipped experiments."""

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.base_model import generate_demonstrations
from rollout.records.trajectory import Demonstration


def make_demonstrations(experiment: str, n: int, **options: object) -> list[Demonstration]:
    """Return `n` demonstrations of an experiment's cold start, with some of its options changed."""
    config = RunConfig.from_values(resolve([f"experiment={experiment}"]), experiment)
    assert config.cold_start is not None
    changed = config.cold_start.options | options
    cold_start = config.cold_start.model_copy(update={"options": changed})
    return list(generate_demonstrations(config, cold_start, n))
