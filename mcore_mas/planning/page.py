"""Plans that people read: of one run in the terminal, and of all published experiments as docs/plan.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mcore_mas.config.compose import CONFIGS, resolve
from mcore_mas.config.credit import cut_off
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import Cluster, PlanError, choose_placement, describe, shapes_of, transport
from mcore_mas.planning.estimate import ASSUMED, GPUS, Placement, RunEstimate
from mcore_mas.planning.memory import LOGITS, count_parameters
from mcore_mas.reports.pages import render_page
from mcore_mas.reports.published import paper_hardware, published_experiments, read_published
from mcore_mas.rollout.models.architecture import published_shapes

PLAN = CONFIGS.parent / "docs" / "plan.md"
_SHOWN = tuple(map(Cluster.parse, ("4xH100", "8xH100", "16xH100")))


def render_plan(names: Sequence[str] | None = None) -> str:
    """The page, of all published experiments or of those in `names`."""
    published = published_experiments() if names is None else names
    return render_page(
        "plan.md.jinja",
        clusters=_SHOWN,
        rows=[plan_row(name) for name in published],
        assumed=asdict(ASSUMED),
        gpus=GPUS,
        logits=LOGITS >> 20,
        models=published_shapes(),
        hardware=read_published()["hardware"],
        sources=read_published()["sources"],
    )


def plan_row(name: str) -> list[str]:
    """The cells of an experiment in the page's table: name, models, what it gets of each cluster and of its paper's."""
    config = RunConfig.check(resolve([f"experiment={name}"]), name)
    sizes = [f"{count_parameters(a) / 1e9:.1f}B" for a in shapes_of(config).values()]
    models = " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))
    critics = " and critics" if any(config.policies[p].critic for p in config.trained) else ""
    return [f"`{name}`", models + critics, *(_cell(config, cluster) for cluster in _SHOWN), _own(config, name)]


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


def plan_lines(config: RunConfig, cluster: Cluster, placement: Placement, estimate: RunEstimate) -> Iterator[str]:
    """What a run gets, in lines."""
    seconds = ", ".join(f"{part} {s:.0f}" for part, s in estimate.seconds.items())
    yield f"{config.run} on {cluster}: {describe(placement)}; transport {transport(placement)}"
    fullest = f"{_gb(estimate.update)} in an update, {_gb(estimate.rollout)} in a rollout"
    yield f"  fullest GPU: {fullest}, of {cluster.gpu.memory:.0f} GB"

    for (policy, part), memory in estimate.trainers.items():
        parts: dict[str, Any] = asdict(memory)
        yield f"  {policy} {part}: " + ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
    weights = ", ".join(f"{policy} {_gb(size)}" for policy, size in estimate.weights.items())
    yield f"  engines: weights {weights}; keys and values {_gb(estimate.kv)} each"
    yield f"  step: at most {estimate.tokens / 1e6:.2f} M tokens, {estimate.step_s:.0f} s ({seconds})"
    sizes = f"disk {_gb(estimate.disk)}; host memory {_gb(estimate.host)}"
    yield f"  {config.trainer.steps} steps: {estimate.hours:.1f} h; {sizes}"
    yield from (f"  {line}" for line in cut_off(config.agents))


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
