"""The page docs/plan.md: what all published experiments get of several clusters."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from docs.writers import DOCS, rendered
from docs.writers.experiments import published_experiments
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import Cluster, PlanError, choose_placement, describe, shapes_of
from mcore_mas.planning.estimate import ASSUMED
from mcore_mas.planning.memory import GPUS, LOGITS, count_parameters
from mcore_mas.reports.paper_results import read_published
from rollout.models.architecture import published_shapes

PLAN = DOCS / "plan.md"
_SHOWN = tuple(map(Cluster.parse, ("4xH100", "8xH100", "16xH100")))


def pages() -> dict[Path, str]:
    """The page, of all published experiments."""
    alike: dict[tuple[str, ...], list[str]] = {}  # experiments by their models and plans
    for name in published_experiments():
        alike.setdefault(tuple(plan_row(name)), []).append(f"`{name}`")
    page = rendered(
        "plan",
        clusters=_SHOWN,
        rows=[[", ".join(own), *cells] for cells, own in alike.items()],
        assumed=asdict(ASSUMED),
        gpus=GPUS,
        logits=LOGITS >> 20,
        models=published_shapes(),
        hardware=read_published()["hardware"],
        sources=read_published()["sources"],
    )
    return {PLAN: page}


def plan_row(name: str) -> list[str]:
    """The cells of an experiment in the page's table: models, what it gets of each cluster and of its paper's."""
    config = RunConfig.check(resolve([f"experiment={name}"]), name)
    sizes = [f"{count_parameters(a) / 1e9:.1f}B" for a in shapes_of(config).values()]
    models = " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))
    critics = " and critics" if any(config.policies[p].critic for p in config.trained) else ""
    return [models + critics, *(_cell(config, cluster) for cluster in _SHOWN), _own(config, name)]


def _own(config: RunConfig, name: str) -> str:
    gpus = paper_hardware(name)
    if gpus is None:
        return "not named"
    return gpus if gpus in map(str, _SHOWN) else f"{gpus}: {_cell(config, Cluster.parse(gpus))}"


def _cell(config: RunConfig, cluster: Cluster) -> str:
    try:
        placement, estimate = choose_placement(config, cluster)
    except PlanError as error:
        return "**no**: " + str(error).rpartition("; ")[2]
    gb = max(estimate.update, estimate.rollout) / 1e9
    return f"{describe(placement)}: {gb:.0f} GB, {estimate.step_s:.0f} s, {estimate.hours:.0f} h"


def paper_hardware(experiment: str) -> str | None:
    """The GPUs that an experiment's paper names, such as 8xH100; None where it names none."""
    found = [
        own["gpus"]
        for own in read_published()["hardware"]
        if any(fnmatch(experiment, p) for p in own["of"])
    ]
    return found[-1] if found else None
