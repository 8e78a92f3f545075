"""Export of a sharded model (resharding): full tensors, gathered from all ranks' shards in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, renumber
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.state.weight_import import WeightMapping, weight_mappings
from rollout.models.architecture import Architecture
from rollout.models.tensors import buckets

# Upper bound of the bytes of one rank's shards that are gathered in one call, unless one is larger.
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one pipeline stage and one type whose shards are gathered in one call.

    Attributes:
        stage: pipeline rank that has the parameters.
        is_expert: True for parameters of experts; each expert-parallel rank has different experts.
        shards: each parameter's mapping, and a tensor on the "meta" device of its shard's shape.
    """

    stage: int
    is_expert: bool
    shards: tuple[tuple[WeightMapping, Tensor], ...]


ExportPlan = tuple[Bucket, ...]


def plan_export(
    local: Mapping[str, Tensor],
    architecture: Architecture,
    bucket_bytes: int = _BUCKET_BYTES,
) -> ExportPlan:
    """Group the parameters of all pipeline stages into buckets; all ranks of a pipeline must call.

    The plan is the same on every rank. It stays valid as long as the names, shapes and types of
    `local` stay the same.

    Args:
        local: this rank's tensors by Megatron parameter name: parameters, or tensors of their shapes.
        architecture: architecture of the model.
        bucket_bytes: upper bound of the bytes of one rank's shards in a bucket, unless it has a
            single larger shard.
    """
    types_and_shapes = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in local.items()
    }
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    stages = all_gather_json(types_and_shapes, pipeline)
    planned: set[str] = set()
    plan: list[Bucket] = []
    for stage, parameters in enumerate(stages):
        groups: dict[tuple[bool, str], list[tuple[WeightMapping, Tensor]]] = {}
        for mapping in weight_mappings(parameters, tied=architecture.tied):
            if planned.issuperset(mapping.tensors):
                continue  # this is the last stage's copy of a tied embedding
            planned.update(mapping.tensors)
            dtype, shape = parameters[mapping.parameter]
            shard = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            groups.setdefault((mapping.is_expert, dtype), []).append((mapping, shard))
        for (is_expert, _), shards in groups.items():
            for bucket in buckets(shards, bucket_bytes):
                plan.append(Bucket(stage=stage, is_expert=is_expert, shards=tuple(bucket)))
    return tuple(plan)


def export_weights(
    local: Callable[[str], Tensor], architecture: Architecture, plan: ExportPlan
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (Hugging Face name, full tensor in blocks of rows) from all ranks' shards.

    All ranks must iterate to the end. Where a single rank has all shards of a bucket, and there is
    one pipeline stage, the blocks are views of the results of `local` unless those are not
    contiguous.

    Args:
        local: returns this rank's tensor by Megatron parameter name; called when the tensor is sent.
        architecture: architecture of the model.
        plan: result of `plan_export` for these names.
    """
    for bucket in plan:
        heartbeat()
        for (mapping, _), shards in zip(bucket.shards, _gather_shards(local, bucket), strict=True):
            rank_mappings = _mappings_by_expert_rank(mapping, architecture)
            tp = len(shards) // len(rank_mappings)
            for number, rank_mapping in enumerate(rank_mappings):
                tp_shards = shards[number * tp : (number + 1) * tp]
                full_tensors = rank_mapping.join(tp_shards, architecture)
                yield from zip(rank_mapping.tensors, full_tensors, strict=True)


def _gather_shards(local: Callable[[str], Tensor], bucket: Bucket) -> list[list[Tensor]]:
    """Gather the shards of a bucket's parameters from all ranks; return those of each parameter."""
    if bucket.is_expert:  # in this group, the tensor-parallel ranks of an expert are neighbours
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_world_size(group)
    stages = dist.get_world_size(pipeline)
    has_bucket = parallel_state.get_pipeline_model_parallel_rank() == bucket.stage
    local_shards: list[Tensor] = []
    if has_bucket:
        local_shards = [
            local(mapping.parameter).detach().contiguous() for mapping, _ in bucket.shards
        ]
    if ranks == stages == 1:
        return [[tensor] for tensor in local_shards]

    shards = [shard for _, shard in bucket.shards]
    sizes = [shard.numel() for shard in shards]
    flat = torch.empty(ranks, sum(sizes), dtype=shards[0].dtype, device=rank_device())
    if has_bucket:
        local_row = flat[dist.get_rank(group)]
        torch.cat([tensor.flatten() for tensor in local_shards], out=local_row)
        if ranks > 1:
            dist.all_gather_into_tensor(flat.view(-1), local_row.clone(), group=group)
    if stages > 1:
        dist.broadcast(flat, group=pipeline, group_src=bucket.stage)
    columns = flat.split(sizes, dim=1)
    return [
        [column[rank].view(shard.shape) for rank in range(ranks)]
        for column, shard in zip(columns, shards, strict=True)
    ]


def _mappings_by_expert_rank(
    mapping: WeightMapping, architecture: Architecture
) -> list[WeightMapping]:
    """Return the mapping of an expert's parameter on each expert-parallel rank.

    The parameter has another expert's weights on each of them. For other parameters, return the
    mapping itself.
    """
    if not mapping.is_expert:
        return [mapping]
    assert architecture.experts is not None
    ranks = parallel_state.get_expert_model_parallel_world_size()
    own_rank = parallel_state.get_expert_model_parallel_rank()
    experts_per_rank = architecture.experts.count // ranks
    return weight_mappings(
        renumber(EXPERT_NUMBER, mapping.parameter, (rank - own_rank) * experts_per_rank)
        for rank in range(ranks)
    )
