"""One rank's shard of the model: filled from full tensors, and exported (resharding) as a stream of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.host_memory import BlockMemory, flat_storages
from mcore_mas.megatron.model.build import build_model
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, renumber
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state import weight_import
from mcore_mas.megatron.state.lora import (
    Adapter,
    AdapterFolder,
    adapters,
    attach_adapters,
    initial_adapter,
)
from mcore_mas.megatron.state.tensor_sources import RandomTensors, SafeTensors
from mcore_mas.megatron.state.weight_import import WeightMapping, weight_mappings
from rollout.base.errors import ModelError
from rollout.models.adapter_weights import write_peft
from rollout.models.architecture import Architecture, read_architecture
from rollout.models.layout import check_fit
from rollout.models.tensors import buckets, whole


class ShardedModel:
    """Pipeline stages, with their parameters under Megatron's names; every rank of the process group holds one."""

    def __init__(self, spec: TrainerSpec, base: ShardedModel | None = None) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist.

        Args:
            base: has adapters on the same model in the same layout and precision; its frozen weights are these too.

        Raises:
            ModelError: the folder is no supported model, or cannot be cut as `spec` says.
        """
        self._spec = spec
        self.architecture = read_architecture(Path(spec.model))
        check_fit(self.architecture, spec, spec.layers, spec.lora.targets if spec.lora else ())
        self.stages: list[Any] = []
        for number in range(spec.vpp):
            stage = build_model(self.architecture, spec, number if spec.vpp > 1 else None)
            if base is not None:
                _put_on(stage, base.stages[number])
            self.stages.append(stage.to(rank_device()))
        self._adapters: dict[str, Adapter] = {}
        for stage in self.stages if spec.lora is not None else ():
            attach_adapters(stage, self.architecture, spec)
            self._adapters |= adapters(stage)
        self.tensors = {
            name: p for stage in self.stages for name, p in stage.numbered_parameters().items()
        }
        # what is trained, and so what has gradients, moments and a place in checkpoints
        self.parameters = {name: p for name, p in self.tensors.items() if p.requires_grad}
        self._base = {
            name: p for name, p in self.tensors.items() if not weight_import.is_adapter(name)
        }
        self._low_rank = {
            name: p for name, p in self.parameters.items() if weight_import.is_adapter(name)
        }
        self._reference: BlockMemory | None = (
            None  # its weights once needed; while it scores, those that are trained
        )
        self._plans: dict[str, ExportPlan] = {}  # of "weights" and of "adapter"
        frozen = base._base.items() if base else ()
        self._load(
            self._start(), held={name for name, parameter in frozen if not parameter.requires_grad}
        )

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside the block the frozen reference model; after it the parameters hold the very bits that they held.

        The reference is the weights that training starts from: read on first use, and kept as one copy of this rank's
        shard in the host's memory, with which the parameters change places. With adapters it is the same weights
        without them.

        Raises:
            ModelError: the reference's tensors are of no model of this shape.
        """
        trained = flat_storages(self.parameters.values()) if self._spec.lora is None else []
        if trained and self._reference is None:
            self._reference = self._read_reference(trained)
        self._switch(trained, adapted=False)
        try:
            yield
        finally:
            self._switch(trained, adapted=True)

    def _read_reference(self, trained: Sequence[Tensor]) -> BlockMemory:
        """Its weights as they replace those that are `trained`, which hold them on the way, and then what they held."""
        host = BlockMemory()
        for part, place in host.slots(trained):
            place.copy_(part, non_blocking=True)
        try:
            weight_import.import_weights(self.parameters, self.architecture, self._start())
        finally:
            host.swap(trained)
        return host

    def _switch(self, trained: Sequence[Tensor], *, adapted: bool) -> None:
        for adapter in self._adapters.values():
            adapter.on = adapted
        if self._reference is not None:
            self._reference.swap(trained)

    def _start(self) -> SafeTensors | RandomTensors:
        """The weights that training starts from."""
        if self._spec.init == "folder":
            return SafeTensors(Path(self._spec.model))
        drawn = {
            name: parameter
            for name, parameter in self._base.items()
            if name != weight_import.VALUE_HEAD
        }
        return RandomTensors(
            weight_import.full_shapes(drawn, self.architecture),
            std=self.architecture.init_std,
            seed=self._spec.seed,
        )

    def _load(self, source: SafeTensors | RandomTensors, held: Collection[str]) -> None:
        """Weights that are not `held`, from full tensors; a critic's head keeps its fresh start where there is none."""
        (head,) = weight_mappings([weight_import.VALUE_HEAD])
        there = {*held} if head.tensors[0] in source else {*held, head.parameter}
        missing = {name: parameter for name, parameter in self._base.items() if name not in there}
        weight_import.import_weights(missing, self.architecture, source)
        if (lora := self._spec.lora) is not None:
            fresh = partial(initial_adapter, self.architecture, lora.rank, self._spec.lora_seed)
            adapter = AdapterFolder(Path(lora.adapter), lora) if lora.adapter else fresh
            weight_import.import_weights(self._low_rank, self.architecture, adapter)

    def weights(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (Hugging Face name, full tensor) of all weights, with adapters merged into their base.

        All ranks must iterate to the end. A tensor comes in blocks of its rows. Blocks that no
        other rank has a part of are not copied.
        """
        return self._export("weights", self._base, self._merged)

    def _merged(self, name: str) -> Tensor:
        """A parameter of the base with its adapters' update in it."""
        weight: Tensor = self._base[name].detach()
        if name in self._adapters:
            weight = (weight.float() + self._adapters[name].delta()).to(weight.dtype)
        return weight

    def adapter(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (PEFT name, full tensor) of the adapters; see `weights`. Empty without adapters."""
        return self._export("adapter", self._low_rank)

    def _export(
        self,
        kind: str,
        local: Mapping[str, Tensor],
        read: Callable[[str], Tensor] | None = None,
    ) -> Iterator[tuple[str, list[Tensor]]]:
        if kind not in self._plans:
            self._plans[kind] = plan_export(local, self.architecture)
        return export_weights(read or local.__getitem__, self.architecture, self._plans[kind])

    def write(self, folder: Path) -> None:
        """Write a Hugging Face folder: these weights with the config and tokenizer of the model it started from.

        Adapters are merged into the weights, and are by themselves in its subfolder adapter.
        """
        full = _keep(self.weights())
        try:
            if dist.get_rank() == 0:
                weight_import.write_folder(Path(self._spec.model), folder, full)
        finally:  # one that fails leaves nobody waiting, and can be asked again
            dist.barrier()
        if self._spec.lora is not None:
            self.write_adapter(folder / "adapter")

    def write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's format.

        Raises:
            ModelError: all weights are trained, and there are no adapters.
        """
        lora = self._spec.lora
        if lora is None:
            raise ModelError(
                f"{folder}: nothing written; the policy trains all weights and has no adapter"
            )
        full = _keep(self.adapter())
        if dist.get_rank() == 0:
            write_peft(
                folder,
                self._spec.model,
                full,
                rank=lora.rank,
                alpha=lora.alpha,
                targets=lora.targets,
            )
        dist.barrier()


def _put_on(stage: PackedGPTModel, base: PackedGPTModel) -> None:
    """Give a pipeline stage the frozen parameters of `base` for its own, which nothing has been written to yet."""
    held = {
        name: p for name, p in base.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    for path, module in stage.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, held.get(f"{path}.{name}", module.get_parameter(name)))


def _keep(stream: Iterator[tuple[str, list[Tensor]]]) -> dict[str, Tensor]:
    """All tensors of a stream on the CPU of rank 0; nothing on the others, which drain it."""
    writer = dist.get_rank() == 0
    return {name: whole(blocks).cpu().contiguous() for name, blocks in stream if writer}


_BUCKET_BYTES = 64 << 20  # of one rank's shards that travel together


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one pipeline stage and one type whose shards are gathered in one call.

    Attributes:
        stage: pipeline rank that has the parameters.
        expert: True for parameters of experts, of which each expert-parallel rank has others.
        shards: each parameter's mapping, with an empty ("meta") tensor of its shard's shape.
    """

    stage: int
    expert: bool
    shards: tuple[tuple[WeightMapping, Tensor], ...]


ExportPlan = tuple[Bucket, ...]


def plan_export(
    local: Mapping[str, Tensor],
    architecture: Architecture,
    bucket_bytes: int = _BUCKET_BYTES,
) -> ExportPlan:
    """Group the parameters of all pipeline stages into buckets; all ranks of a pipeline must call.

    The plan is the same on every rank, and stays valid while names, shapes and types of `local` do.

    Args:
        local: this rank's tensors by Megatron parameter name: parameters, or tensors of their shapes.
        bucket_bytes: upper bound of a bucket.
    """
    held = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in local.items()
    }
    stages = all_gather_json(held, parallel_state.get_pipeline_model_parallel_group())
    planned: set[str] = set()
    plan: list[Bucket] = []
    for stage, parameters in enumerate(stages):
        groups: dict[tuple[bool, str], list[tuple[WeightMapping, Tensor]]] = {}
        for mapping in weight_mappings(parameters, tied=architecture.tied):
            if planned.issuperset(mapping.tensors):
                continue  # the last stage's copy of a tied embedding
            planned.update(mapping.tensors)
            dtype, shape = parameters[mapping.parameter]
            shard = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            groups.setdefault((mapping.expert, dtype), []).append((mapping, shard))
        for (expert, _), shards in groups.items():
            for bucket in buckets(shards, bucket_bytes):
                plan.append(Bucket(stage=stage, expert=expert, shards=tuple(bucket)))
    return tuple(plan)


def export_weights(
    local: Callable[[str], Tensor], architecture: Architecture, plan: ExportPlan
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (Hugging Face name, full tensor in blocks of rows) from all ranks' shards.

    All ranks must iterate to the end. Where nothing is cut, the blocks are views of what `local`
    returns.

    Args:
        local: returns this rank's tensor by Megatron parameter name; called when it is sent.
        plan: result of `plan_export` for these names.
    """
    for bucket in plan:
        heartbeat()
        for (mapping, _), shards in zip(bucket.shards, _gather_shards(local, bucket), strict=True):
            holders = _holders(mapping, architecture)
            tp = len(shards) // len(holders)
            for number, holder in enumerate(holders):
                full = holder.join(shards[number * tp : (number + 1) * tp], architecture)
                yield from zip(holder.tensors, full, strict=True)


def _gather_shards(local: Callable[[str], Tensor], bucket: Bucket) -> list[list[Tensor]]:
    """Gather the shards of a bucket's parameters; return, for each parameter, all ranks' shards."""
    if bucket.expert:  # tensor-parallel ranks are neighbours in this group
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_world_size(group)
    stages = dist.get_world_size(pipeline)
    is_holder = parallel_state.get_pipeline_model_parallel_rank() == bucket.stage
    own: list[Tensor] = []
    if is_holder:
        own = [local(mapping.parameter).detach().contiguous() for mapping, _ in bucket.shards]
    if ranks == stages == 1:
        return [[tensor] for tensor in own]

    shards = [shard for _, shard in bucket.shards]
    sizes = [shard.numel() for shard in shards]
    flat = torch.empty(ranks, sum(sizes), dtype=shards[0].dtype, device=rank_device())
    if is_holder:
        own_row = flat[dist.get_rank(group)]
        torch.cat([tensor.flatten() for tensor in own], out=own_row)
        if ranks > 1:
            dist.all_gather_into_tensor(flat.view(-1), own_row.clone(), group=group)
    if stages > 1:
        dist.broadcast(flat, group=pipeline, group_src=bucket.stage)
    columns = flat.split(sizes, dim=1)
    return [
        [column[rank].view(shard.shape) for rank in range(ranks)]
        for column, shard in zip(columns, shards, strict=True)
    ]


def _holders(entry: WeightMapping, architecture: Architecture) -> list[WeightMapping]:
    """The same parameter on every expert-parallel rank, where it is of other experts; else just this one."""
    if not entry.expert:
        return [entry]
    assert architecture.experts is not None
    ranks = parallel_state.get_expert_model_parallel_world_size()
    each = architecture.experts.count // ranks
    here = parallel_state.get_expert_model_parallel_rank()
    return weight_mappings(
        renumber(EXPERT_NUMBER, entry.parameter, (rank - here) * each) for rank in range(ranks)
    )
