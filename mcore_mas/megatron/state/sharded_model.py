"""One rank's shard of the model: pipeline stages that load weights and export full tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.host_memory import BlockMemory, flat_storages
from mcore_mas.megatron.model.build import build_model
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.lora import (
    Adapter,
    AdapterFolder,
    adapters_by_weight,
    attach_adapters,
    initial_adapter,
)
from mcore_mas.megatron.state.tensor_sources import RandomTensors, SafeTensors
from mcore_mas.megatron.state.weight_export import ExportPlan, export_weights, plan_export
from mcore_mas.megatron.state.weight_import import (
    VALUE_HEAD,
    full_shapes,
    import_weights,
    is_adapter,
    weight_mappings,
    write_folder,
)
from rollout.base.errors import ModelError
from rollout.models.adapter_weights import write_peft
from rollout.models.architecture import read_architecture
from rollout.models.layout import check_fit
from rollout.models.tensors import join_blocks


class ShardedModel:
    """Pipeline stages of one rank, with parameters by Megatron's names.

    Attributes:
        architecture: architecture of the model.
        stages: pipeline stages of the rank, in order; more than one if stages are interleaved.
        all_parameters: parameters by name, with layers and experts numbered over the whole model.
        trained_parameters: those that have gradients, optimizer state and a place in checkpoints.
        base_parameters: all parameters except those of adapters.
    """

    def __init__(self, spec: TrainerSpec, base: ShardedModel | None = None) -> None:
        """Build this rank's stages, and load the weights that training starts from.

        The process group must exist.

        Args:
            spec: specification of the trainer.
            base: model whose frozen weights this model uses too. It must have adapters on the same
                model folder, in the same layout and precision. None: load all weights.

        Raises:
            ModelError: the folder has no supported model, or it cannot be split as `spec` says.
        """
        self._spec = spec
        self.architecture = read_architecture(Path(spec.model))
        targets = spec.lora.targets if spec.lora else ()
        fp8_recipe = spec.fp8_recipe if spec.fp8 else None
        check_fit(self.architecture, spec, spec.layers, targets, fp8_recipe)

        self.stages: list[Any] = []
        for number in range(spec.vpp):
            stage = build_model(self.architecture, spec, number if spec.vpp > 1 else None)
            if base is not None:
                _share_frozen_parameters(stage, base.stages[number])
            self.stages.append(stage.to(rank_device()))
        self._adapters: dict[str, Adapter] = {}
        if spec.lora is not None:
            for stage in self.stages:
                attach_adapters(stage, self.architecture, spec)
                self._adapters |= adapters_by_weight(stage)

        self.all_parameters: dict[str, Parameter] = {}
        for stage in self.stages:
            self.all_parameters |= stage.numbered_parameters()
        self.trained_parameters = {
            name: parameter
            for name, parameter in self.all_parameters.items()
            if parameter.requires_grad
        }
        self.base_parameters = {
            name: parameter
            for name, parameter in self.all_parameters.items()
            if not is_adapter(name)
        }
        self._adapter_parameters = {
            name: parameter
            for name, parameter in self.trained_parameters.items()
            if is_adapter(name)
        }

        # Host copy of the reference model's weights, None until its first use. In `reference()` it
        # holds the trained weights instead.
        self._reference_memory: BlockMemory | None = None
        # Host copies of the trained weights of earlier versions, the oldest first. In `at_version()`
        # the copy of that version holds the present weights instead.
        self._version_memory: dict[int, BlockMemory] = {}
        # Plans of `weights` and `adapter`, by these names.
        self._plans: dict[str, ExportPlan] = {}
        self._load(shared=base.frozen_names() if base is not None else set())

    def frozen_names(self) -> set[str]:
        """Return the names of the parameters that are not trained."""
        return self.all_parameters.keys() - self.trained_parameters.keys()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make this the frozen reference model in a block; afterwards it has the same bits as before.

        The reference has the weights that training starts from. They are loaded on first use, and
        kept as a copy of this rank's shard in host memory, which the parameters are swapped with.
        With adapters, the reference is the model without them, and nothing is swapped.

        Raises:
            ModelError: the folder's tensors do not fit the model.
        """
        trained: list[Tensor] = []
        if self._spec.lora is None:
            trained = flat_storages(self.trained_parameters.values())
        if trained and self._reference_memory is None:
            self._reference_memory = self._load_reference(trained)
        self._swap_reference(trained, adapters_enabled=False)
        try:
            yield
        finally:
            self._swap_reference(trained, adapters_enabled=True)

    def keep_version(self, version: int, count: int) -> None:
        """Copy the trained weights of this rank to host memory, as those of `version`.

        Args:
            version: version that the engine serves these weights as.
            count: number of copies to keep; older ones are dropped.
        """
        if version in self._version_memory:
            return
        memory = BlockMemory()
        while len(self._version_memory) >= count:
            memory = self._version_memory.pop(next(iter(self._version_memory)))
        for part, slot in memory.slots(flat_storages(self.trained_parameters.values())):
            slot.copy_(part, non_blocking=True)
        self._version_memory[version] = memory

    def drop_versions(self) -> None:
        """Drop the copies of all earlier versions."""
        self._version_memory.clear()

    @contextmanager
    def at_version(self, version: int) -> Iterator[None]:
        """Make this the model of a kept version in a block; afterwards it has the same bits as before."""
        trained = flat_storages(self.trained_parameters.values())
        memory = self._version_memory[version]
        memory.swap(trained)
        try:
            yield
        finally:
            memory.swap(trained)

    def _load_reference(self, trained: Sequence[Tensor]) -> BlockMemory:
        """Load the reference's weights to host memory.

        They are loaded to the parameters first, while the trained weights are in host memory; then
        both are swapped.

        Args:
            trained: storages of the trained parameters.
        """
        memory = BlockMemory()
        for part, slot in memory.slots(trained):
            slot.copy_(part, non_blocking=True)
        try:
            import_weights(
                self.trained_parameters,
                self.architecture,
                self._initial_weights(),
                self._spec.model,
            )
        finally:
            memory.swap(trained)
        return memory

    def _swap_reference(self, trained: Sequence[Tensor], *, adapters_enabled: bool) -> None:
        """Swap the trained weights with those of the reference; switch the adapters on or off."""
        for adapter in self._adapters.values():
            adapter.enabled = adapters_enabled
        if self._reference_memory is not None:
            self._reference_memory.swap(trained)

    def _initial_weights(self) -> SafeTensors | RandomTensors:
        """Return the source of the weights, without adapters, that training starts from."""
        if self._spec.init == "folder":
            return SafeTensors(Path(self._spec.model))
        # The module of a value head initialises its own weights.
        drawn = {
            name: parameter
            for name, parameter in self.base_parameters.items()
            if name != VALUE_HEAD
        }
        return RandomTensors(
            full_shapes(drawn, self.architecture),
            std=self.architecture.init_std,
            seed=self._spec.seed,
        )

    def _load(self, shared: Collection[str]) -> None:
        """Load the weights that training starts from, and the adapters.

        A value head keeps its initial weights if the source has no value head.

        Args:
            shared: names of parameters that are shared with a loaded model.
        """
        source = self._initial_weights()
        (head,) = weight_mappings([VALUE_HEAD])
        has_value_head = head.tensors[0] in source
        missing = {
            name: parameter
            for name, parameter in self.base_parameters.items()
            if name not in shared and (has_value_head or name != VALUE_HEAD)
        }
        import_weights(missing, self.architecture, source, self._spec.model)

        lora = self._spec.lora
        if lora is None:
            return
        if lora.adapter:
            adapter = AdapterFolder(Path(lora.adapter), lora)
            import_weights(self._adapter_parameters, self.architecture, adapter, lora.adapter)
        else:
            seed = self._spec.lora_seed
            new_adapter = partial(initial_adapter, self.architecture, lora.rank, seed)
            import_weights(
                self._adapter_parameters, self.architecture, new_adapter, self._spec.model
            )

    def weights(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (Hugging Face name, full tensor) of all weights, with adapters merged into their base.

        All ranks must iterate to the end. A tensor comes in blocks of its rows, which may be views
        of the parameters; see `export_weights`.
        """
        return self._export("weights", self.base_parameters, self._merged_weight)

    def adapter(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (PEFT name, full tensor) of the adapters; see `weights`. Empty without adapters."""
        parameters = self._adapter_parameters
        return self._export("adapter", parameters, parameters.__getitem__)

    def _merged_weight(self, name: str) -> Tensor:
        """Return this rank's shard of a weight, with its adapter's update added."""
        weight: Tensor = self.base_parameters[name].detach()
        if name in self._adapters:
            weight = (weight.float() + self._adapters[name].merged_delta()).to(weight.dtype)
        return weight

    def _export(
        self, kind: str, local: Mapping[str, Tensor], read: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Export tensors, by a plan that is made once.

        Args:
            kind: key of the plan.
            local: this rank's parameters by name.
            read: returns this rank's shard by name, in the shape and type of the parameter.
        """
        if kind not in self._plans:
            self._plans[kind] = plan_export(local, self.architecture)
        return export_weights(read, self.architecture, self._plans[kind])

    def write(self, folder: Path) -> None:
        """Write a Hugging Face folder with config and tokenizer of `spec.model`; all ranks must call.

        Adapters are merged into the weights, and also written separately to the subfolder adapter.
        """
        tensors = _collect_on_rank_0(self.weights())
        try:
            if dist.get_rank() == 0:
                write_folder(Path(self._spec.model), folder, tensors)
        finally:
            # If rank 0 fails, the others must not wait for it, so that the call can be repeated.
            dist.barrier()
        if self._spec.lora is not None:
            self.write_adapter(folder / "adapter")

    def write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's format; all ranks must call.

        Raises:
            ModelError: the model has no adapters.
        """
        lora = self._spec.lora
        if lora is None:
            raise ModelError(
                f"{folder}: nothing written; the policy trains all weights and has no adapter"
            )
        tensors = _collect_on_rank_0(self.adapter())
        if dist.get_rank() == 0:
            write_peft(
                folder,
                self._spec.model,
                tensors,
                rank=lora.rank,
                alpha=lora.alpha,
                targets=lora.targets,
            )
        dist.barrier()


def _share_frozen_parameters(stage: PackedGPTModel, base: PackedGPTModel) -> None:
    """Replace parameters of a new pipeline stage by the frozen ones of another model's stage."""
    frozen = {
        name: parameter
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    for path, module in stage.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, frozen.get(f"{path}.{name}", parameter))


def _collect_on_rank_0(stream: Iterator[tuple[str, list[Tensor]]]) -> dict[str, Tensor]:
    """Return all tensors of an export on the CPU of rank 0, and {} on the other ranks."""
    is_writer = dist.get_rank() == 0
    tensors = {}
    for name, blocks in stream:  # every rank must iterate to the end
        if is_writer:
            tensors[name] = join_blocks(blocks).cpu().contiguous()
    return tensors
