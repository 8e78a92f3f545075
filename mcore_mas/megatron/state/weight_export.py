"""Weight export (resharding): the shards of all ranks as a stream of full tensors, gathered bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron import parallel
from mcore_mas.megatron.model.decoder import EXPERT, renumbered
from mcore_mas.megatron.state.names import WeightMapping, weight_mappings
from rollout.models.architecture import Architecture

_BUCKET_BYTES = 64 << 20  # of one rank's shards that travel together


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one pipeline stage and one type whose shards are gathered at once."""

    stage: int
    expert: bool  # of experts, which expert-parallel ranks hold different ones of
    dtype: torch.dtype
    mappings: tuple[WeightMapping, ...]
    shapes: tuple[tuple[int, ...], ...]  # of this rank's shard of each


ExportPlan = tuple[Bucket, ...]


def plan_export(
    local: Mapping[str, Tensor], architecture: Architecture, bucket_bytes: int = _BUCKET_BYTES
) -> ExportPlan:
    """What is gathered together, the same on every rank of a pipeline; all its ranks must call.

    It stays right as long as names, shapes and types of `local` do.

    Args:
        local: this rank's tensors by Megatron parameter name: parameters, or anything shaped like them.
        bucket_bytes: at which a bucket is closed.
    """
    held = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in local.items()}
    told: set[str] = set()
    plan = []
    for stage, kinds in enumerate(parallel.exchange(held, parallel_state.get_pipeline_model_parallel_group())):
        groups: dict[tuple[bool, str], list[WeightMapping]] = {}
        for entry in weight_mappings(kinds, tied=architecture.tied):
            if not told.issuperset(entry.tensors):  # else the last stage's copy of a tied embedding
                told.update(entry.tensors)
                groups.setdefault((entry.expert, kinds[entry.parameter][0]), []).append(entry)
        for (expert, kind), alike in groups.items():
            dtype = getattr(torch, kind)
            for part in _cut(alike, [math.prod(kinds[e.parameter][1]) * dtype.itemsize for e in alike], bucket_bytes):
                shapes = tuple(tuple(kinds[entry.parameter][1]) for entry in part)
                plan.append(Bucket(stage=stage, expert=expert, dtype=dtype, mappings=tuple(part), shapes=shapes))
    return tuple(plan)


def _cut(alike: Sequence[WeightMapping], sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[WeightMapping]]:
    part: list[WeightMapping] = []
    size = 0
    for entry, more in zip(alike, sizes, strict=True):
        part.append(entry)
        size += more
        if size >= bucket_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def export_weights(
    local: Mapping[str, Tensor], architecture: Architecture, plan: ExportPlan
) -> Iterator[tuple[str, list[Tensor]]]:
    """Stream (Hugging Face name, full tensor in blocks of rows) from all ranks' shards; every rank must drain it.

    Where nothing is cut, the blocks are parts of `local` itself.

    Args:
        local: this rank's tensors by Megatron parameter name.
        plan: of these names, as `plan_export` made it.
    """
    for bucket in plan:
        holders = [_holders(entry, architecture) for entry in bucket.mappings]
        for names, shards in zip(holders, _shards(local, bucket), strict=True):
            tp = len(shards) // len(names)
            for number, holder in enumerate(names):
                full = holder.sharding.join(shards[number * tp : (number + 1) * tp], architecture)
                yield from zip(holder.tensors, full, strict=True)


def _shards(local: Mapping[str, Tensor], bucket: Bucket) -> list[list[Tensor]]:
    """Of each of the bucket's parameters every rank's shard, on every rank."""
    group = (
        parallel_state.get_expert_tensor_and_model_parallel_group()  # tensor-parallel ranks are neighbours
        if bucket.expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    stages = parallel_state.get_pipeline_model_parallel_group()
    ranks, pipeline = dist.get_world_size(group), dist.get_world_size(stages)
    here = parallel_state.get_pipeline_model_parallel_rank() == bucket.stage
    mine = [local[entry.parameter].detach().contiguous() for entry in bucket.mappings] if here else []
    if ranks == pipeline == 1:
        return [[tensor] for tensor in mine]
    sizes = [math.prod(shape) for shape in bucket.shapes]
    flat = torch.empty(ranks, sum(sizes), dtype=bucket.dtype, device=parallel.device())
    if here:
        torch.cat([tensor.flatten() for tensor in mine], out=flat[dist.get_rank(group)])
        if ranks > 1:
            dist.all_gather_into_tensor(flat.view(-1), flat[dist.get_rank(group)].clone(), group=group)
    if pipeline > 1:
        dist.broadcast(flat, group=stages, group_src=bucket.stage)
    parts = flat.split(sizes, dim=1)
    return [[part[rank].view(shape) for rank in range(ranks)] for part, shape in zip(parts, bucket.shapes, strict=True)]


def _holders(entry: WeightMapping, architecture: Architecture) -> list[WeightMapping]:
    """The same parameter on every expert-parallel rank, where it is another expert's; else just this one."""
    if not entry.expert:
        return [entry]
    assert architecture.experts is not None
    ranks = parallel_state.get_expert_model_parallel_world_size()
    each = architecture.experts.count // ranks
    here = parallel_state.get_expert_model_parallel_rank()
    return weight_mappings(renumbered(EXPERT, entry.parameter, (rank - here) * each) for rank in range(ranks))
