"""Choice of a placement: of all that fit a cluster and use all of its GPUs, the one with the shortest step."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import yaml

from mcore_mas.config.models import cold_started, layout_of
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.estimate import (
    PASSES,
    Models,
    Placement,
    RunEstimate,
    estimate_run,
    rank_of,
    rank_sets,
    workloads,
)
from mcore_mas.planning.memory import GPU, GPUS
from rollout.base.errors import ModelError
from rollout.base.files import read_yaml
from rollout.models.architecture import Architecture, planned_architecture
from rollout.models.layout import ParallelLayout, check_fit

_SIZES = (1, 2, 4, 8, 16, 32, 64)  # GPUs among which the nearest that fits is looked for
# of the numbers in a file of a cluster
_UNITS = {
    "node": " of GPUs in a machine",
    "memory": ", in GB",
    "flops": ", in TFLOP/s",
    "bandwidth": ", in TB/s",
}
_CUTS = (1, 2, 4, 8)  # ranks that tensor parallelism may take, within a machine


class PlanError(ValueError):
    """A run fits no placement of a cluster, or a cluster cannot be read: one line that says what would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of one kind, in machines of equally many."""

    gpus: int
    kind: str
    gpu: GPU
    node: int = 8  # GPUs of a machine, at most

    @classmethod
    def parse(cls, text: str) -> Self:
        """From words such as 8xH100, in machines of eight.

        Raises:
            PlanError: it is not a number of GPUs of a known kind.
        """
        found = re.fullmatch(r"(\d+)x(.+)", text)
        if not found or not int(found[1]) or found[2] not in GPUS:
            raise PlanError(
                f"GPUs '{text}': expected a number and a kind, for example 8xH100; kinds: {', '.join(GPUS)}"
            )
        return cls(gpus=int(found[1]), kind=found[2], gpu=GPUS[found[2]])

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a YAML file: gpus (16xH100), and where they differ node (GPUs of a machine), memory, flops, bandwidth.

        Raises:
            PlanError: the file cannot be read, or has other keys.
        """
        try:
            values = read_yaml(path)
        except (OSError, yaml.YAMLError) as error:
            raise PlanError(f"{path}: {' '.join(str(error).split())}") from error
        unknown = set(values) - {"gpus", *_UNITS} if isinstance(values, dict) else {"no mapping"}
        if unknown or "gpus" not in values:
            key = min(map(str, unknown), default="gpus")
            raise PlanError(f"{path}: {key}; expected gpus: 16xH100, and {', '.join(_UNITS)}")
        for key in values.keys() & _UNITS.keys():
            if (
                type(values[key]) not in ((int,) if key == "node" else (int, float))
                or not values[key] > 0
            ):
                raise PlanError(
                    f"{path}: {key}: {values[key]!r}; expected a number above 0{_UNITS[key]}"
                )
        plain = cls.parse(str(values["gpus"]))
        sizes = {key: float(size) for key, size in values.items() if key not in ("gpus", "node")}
        return replace(plain, gpu=replace(plain.gpu, **sizes), node=values.get("node", plain.node))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.gpus}x{self.kind}"


def shapes_of(config: RunConfig) -> dict[str, Architecture]:
    """The shape of every policy's model: its config.json, that of the cold start that will make it, or as published.

    Raises:
        ModelError: nobody knows it.
    """
    if config.cold_start is None:
        return {policy: planned_architecture(folder) for policy, folder in config.models.items()}
    return dict.fromkeys(config.models, cold_started(config.cold_start.base, "cold_start.base"))


def choose_placement(config: RunConfig, cluster: Cluster) -> tuple[Placement, RunEstimate]:
    """The placement with the shortest step among those that fit `cluster`.

    Raises:
        PlanError: none fits; names what is short, and the least GPUs of that kind with which one does.
        ModelError: the shape of a model is not known.
    """
    if config.engine.name != "sglang" or config.engine.urls:
        raise PlanError(
            f"{config.run}: its engine takes no GPUs of its own; plans are of engine.name: sglang without urls"
        )
    for policy in config.models:
        if keys := {"name", "tp", "replicas", "urls"} & config.policies[policy].own.engine.keys():
            raise PlanError(
                f"{config.run}: policies.{policy}.own.engine.{min(keys)}: plans cut the engines of all policies alike; "
                "leave it out, or place the run by hand without cluster.gpus"
            )
    models = shapes_of(config)
    best = _best(config, models, cluster)
    if best is not None and not best[1].lack:
        return best
    larger = (replace(cluster, gpus=gpus) for gpus in _SIZES if gpus != cluster.gpus)
    fitting = next(
        (c for c in larger if (own := _best(config, models, c)) is not None and not own[1].lack),
        None,
    )
    if best is None:
        why = f"the trainers and engines of {len(models)} policies cannot share out {cluster.gpus} GPUs evenly"
    else:
        why = f"the fullest GPU is short of {best[1].lack / 1e9:.1f} GB with {describe(best[0])}"
    nearest = (
        f"nearest that fits: {fitting}"
        if fitting
        else f"nothing up to {replace(cluster, gpus=_SIZES[-1])} fits"
    )
    raise PlanError(f"{config.run}: nothing fits {cluster}; {why}; {nearest}")


# what no estimate depends on: runs of a suite often differ in nothing else
_BESIDE = {"run", "results", "seed", "tracking", "env", "data", "reward", "advantage"}
_Found = tuple[Placement, RunEstimate] | None
_known: dict[object, _Found] = {}  # in this process, by all that it depends on


def _best(config: RunConfig, models: Models, cluster: Cluster) -> _Found:
    """The fastest placement that fits, or the one that lacks least; None where nothing divides."""
    key = config.model_dump_json(exclude=_BESIDE), tuple(models.items()), cluster
    if key not in _known:
        _known[key] = _searched(config, models, cluster)
    return _known[key]


def _searched(config: RunConfig, models: Models, cluster: Cluster) -> _Found:
    found: tuple[tuple[float, float], Placement] | None = None
    works = workloads(config)
    sizes = dict.fromkeys((config.trainer.microbatch_tokens, config.engine.max_length))
    for one_by_one, tokens in itertools.product((False, True), sizes):
        for placement in _placements(config, models, cluster):
            if one_by_one and not placement.colocated:
                continue
            tried = replace(placement, tokens=tokens, one_by_one=one_by_one)
            rank = rank_of(config, models, tried, cluster.gpu, works)
            if found is None or rank < found[0]:
                found = rank, tried
        if found is not None and not found[0][0] and found[1].pool == "shared":
            break  # trainers one by one, and smaller micro-batches, only where nothing that shares GPUs fits without
    return (
        None if found is None else (found[1], estimate_run(config, models, found[1], cluster.gpu))
    )


def _placements(config: RunConfig, models: Models, cluster: Cluster) -> Iterator[Placement]:
    """What uses all GPUs of the cluster: shared by all parts, or split evenly among trainers and among engines."""
    trained = {policy: models[policy] for policy in config.trained}
    trainers = len(rank_sets(config, trained))
    cuts = [
        tp for tp in _CUTS if tp <= cluster.node and all(a.heads % tp == 0 for a in models.values())
    ]
    for tp, recompute in itertools.product(cuts, PASSES):
        made = partial(
            Placement, engine_tp=tp, recompute=recompute, tokens=config.trainer.microbatch_tokens
        )
        if cluster.gpus % tp == 0 and trained:
            for layouts in _layouts(trained, cluster.gpus, cluster.node):
                for colocated in (False,) if config.ahead else (False, True):
                    replicas = cluster.gpus // tp
                    yield made(
                        pool="shared", layouts=layouts, replicas=replicas, colocated=colocated
                    )
        for ranks in range(1, cluster.gpus):
            replicas, rest = divmod(cluster.gpus - ranks * trainers, tp * len(models))
            if replicas > 0 and not rest:
                for layouts in _layouts(trained, ranks, cluster.node):
                    yield made(pool="split", layouts=layouts, replicas=replicas)


def _layouts(models: Models, ranks: int, node: int) -> Iterator[dict[str, ParallelLayout]]:
    """The same number of ranks for every policy, each cut by tensor as far as it and a common bound allow."""
    seen: list[dict[str, ParallelLayout]] = []
    for bound, pp in itertools.product([tp for tp in _CUTS if tp <= node], (1, 2, 4)):
        found = {
            policy: layout
            for policy, a in models.items()
            if (layout := _layout(a, ranks, bound, pp))
        }
        if len(found) == len(models) and found not in seen:
            seen.append(found)
            yield found


@lru_cache(maxsize=4096)
def _layout(a: Architecture, ranks: int, bound: int, pp: int) -> ParallelLayout | None:
    """The widest cut by tensor within `bound` that the model and the number of ranks allow; None if there is none."""
    for tp in sorted(_CUTS, reverse=True):
        if tp > bound or ranks % (tp * pp):
            continue
        layout = ParallelLayout(tp=tp, pp=pp, dp=ranks // (tp * pp), sp=tp > 1)
        try:
            check_fit(a, layout)
        except ModelError:
            continue
        return layout
    return None


def placed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config with the placement for its `cluster.gpus`; it must have that key.

    Raises:
        PlanError: none fits.
        ConfigError: the values are no config.
    """
    config = RunConfig.check(dict(values), f"run '{values['run']}'")
    cluster = Cluster.parse(str(config.cluster.gpus))
    placement, estimate = choose_placement(config, cluster)
    policies = {}
    for name, policy in values["policies"].items():
        policies[name] = policy
        if (layout := placement.layouts.get(name)) is not None:
            own = {
                "offload": placement.colocated,
                "host_moments": placement.one_by_one,
                "overlap": False,
            }
            policies[name] = {**policy, **asdict(layout), **own, "recompute": placement.recompute}
    share = (max(estimate.weights.values()) + estimate.kv) / (cluster.gpu.memory * 1e9)
    engine = {
        "replicas": placement.replicas,
        "tp": placement.engine_tp,
        "sleep": placement.colocated,
        "transport": transport(placement),
        "options": {**values["engine"]["options"], "mem-fraction-static": round(share, 3)},
    }
    changed = {
        "policies": policies,
        "engine": {**values["engine"], **engine},
        "trainer": {**values["trainer"], "microbatch_tokens": placement.tokens},
        "cluster": {
            **values["cluster"],
            "pool": placement.pool,
            "one_by_one": placement.one_by_one,
        },
    }
    return RunConfig.check({**values, **changed}, f"run '{values['run']}'").model_dump(mode="json")


def placement_of(config: RunConfig) -> Placement:
    """The placement that a config spells out."""
    trained = {policy: config.policies[policy] for policy in config.trained}
    return Placement(
        pool=config.cluster.pool,
        layouts={name: layout_of(policy) for name, policy in trained.items()},
        replicas=config.engine.replicas,
        engine_tp=config.engine.tp,
        colocated=any(policy.offload for policy in trained.values()),
        recompute=max(
            (policy.recompute for policy in trained.values()),
            key=list(PASSES).index,
            default="none",
        ),
        tokens=config.trainer.microbatch_tokens,
    )


def transport(placement: Placement) -> str:
    """How new weights reach the engines: by memory on the same GPUs, else by NCCL."""
    return "tensor" if placement.pool == "shared" else "distributed"


def describe(placement: Placement) -> str:
    """A placement in a few words, with policies of one layout named once."""
    cuts: dict[str, list[str]] = {}
    for policy, layout in placement.layouts.items():
        sizes = " ".join(
            f"{key} {size}"
            for key in ("tp", "pp", "cp", "dp")
            if (size := getattr(layout, key)) > 1
        )
        cuts.setdefault(sizes or "one rank", []).append(policy)
    trainers = "; ".join(
        cut if len(cuts) == 1 else f"{', '.join(names)} {cut}" for cut, names in cuts.items()
    )
    engines = f"{placement.replicas} x tp {placement.engine_tp}"
    marks = {"in turn": placement.colocated, "one by one": placement.one_by_one}
    marks |= {f"{placement.recompute} recompute": placement.recompute != "none"}
    rest = [word for word, on in marks.items() if on]
    rest.append(f"{placement.tokens} tokens")
    return ", ".join([placement.pool, f"trainers {trainers}", f"engines {engines}", *rest])
