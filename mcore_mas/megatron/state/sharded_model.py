"""One rank's shard of the model: its pipeline stages and adapters, filled from full tensors and exported as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcore_mas.megatron import parallel
from mcore_mas.megatron.model.build import build_model
from mcore_mas.megatron.spec import TrainerSpec, check_fit
from mcore_mas.megatron.state.lora import (
    Adapter,
    AdapterFolder,
    MergedWeights,
    UnadaptedReference,
    adapters,
    attach_adapters,
    initial_adapter,
    write_adapter,
)
from mcore_mas.megatron.state.names import VALUE_HEAD, LazyTensor, is_adapter, weight_mappings
from mcore_mas.megatron.state.reference import ReferenceModel
from mcore_mas.megatron.state.weight_export import ExportPlan, export_weights, plan_export
from mcore_mas.megatron.state.weight_import import RandomTensors, SafeTensors, full_shapes, import_weights, write_folder
from rollout.base.errors import ModelError
from rollout.models.architecture import read_architecture
from rollout.models.tensors import whole


class ShardedModel:
    """Pipeline stages, with their parameters under Megatron's names; every rank of the process group holds one."""

    def __init__(self, spec: TrainerSpec) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist.

        Raises:
            ModelError: the folder is no supported model, or cannot be cut as `spec` says.
        """
        self._spec = spec
        self.architecture = read_architecture(Path(spec.model))
        check_fit(self.architecture, spec, spec.layers, spec.lora.targets if spec.lora else ())
        self.stages = [
            build_model(self.architecture, spec, vp_stage if spec.vpp > 1 else None).to(parallel.device())
            for vp_stage in range(spec.vpp)
        ]
        self._adapters: dict[str, Adapter] = {}
        for stage in self.stages if spec.lora is not None else ():
            attach_adapters(stage, self.architecture, spec)
            self._adapters |= adapters(stage)
        self.tensors = {name: p for stage in self.stages for name, p in stage.numbered_parameters().items()}
        # what is trained, and so what has gradients, moments and a place in checkpoints
        self.parameters = {name: p for name, p in self.tensors.items() if p.requires_grad}
        self._base = {name: p for name, p in self.tensors.items() if not is_adapter(name)}
        self._low_rank = {name: p for name, p in self.parameters.items() if is_adapter(name)}
        self._plans: dict[str, ExportPlan] = {}  # how what is exported is gathered, by what it is
        self._load(self._start())

    def reference(self) -> ReferenceModel | UnadaptedReference:
        """The frozen reference model: `spec.reference`, or else the weights that training starts from."""
        if self._spec.lora is not None:
            return UnadaptedReference(self._adapters)
        folder = self._spec.reference
        return ReferenceModel(
            self.parameters,
            self.architecture,
            self._start if folder is None else lambda: SafeTensors.of_folder(Path(folder)),
        )

    def _start(self) -> SafeTensors | RandomTensors:
        """The weights that training starts from."""
        if self._spec.init == "folder":
            return SafeTensors.of_folder(Path(self._spec.model))
        drawn = {name: parameter for name, parameter in self._base.items() if name != VALUE_HEAD}
        return RandomTensors(
            full_shapes(drawn, self.architecture), std=self.architecture.init_std, seed=self._spec.seed
        )

    def _load(self, source: SafeTensors | RandomTensors) -> None:
        """Weights from full tensors; a critic's head keeps its fresh start where there is none."""
        held = {
            name: parameter
            for name, parameter in self._base.items()
            if name != VALUE_HEAD or weight_mappings([name])[0].tensors[0] in source
        }
        import_weights(held, self.architecture, source)
        if (lora := self._spec.lora) is not None:
            import_weights(
                self._low_rank,
                self.architecture,
                AdapterFolder(Path(lora.adapter), lora)
                if lora.adapter
                else lambda name: LazyTensor.of(initial_adapter(self.architecture, lora, name)),
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face name, full tensor), adapters merged into their base; every rank must drain it."""
        return _joined(self.weight_blocks())

    def weight_blocks(self) -> Iterator[tuple[str, list[Tensor]]]:
        """`weights`, but each tensor in blocks of its rows, which are copied nowhere if no rank has part of them."""
        return self._export("weights", MergedWeights(self._base, self._adapters))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (PEFT name, full tensor) of the adapters, none where all weights are trained; as `weights`."""
        return _joined(self._export("adapter", self._low_rank))

    def gradients(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face or PEFT name, full tensor) of this rank's gradients by Megatron name; as `weights`."""
        return _joined(self._export("gradients", local))

    def _export(self, what: str, local: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        if what not in self._plans:
            self._plans[what] = plan_export(local, self.architecture)
        return export_weights(local, self.architecture, self._plans[what])

    def write(self, folder: Path) -> None:
        """Write a Hugging Face folder: these weights with the config and tokenizer of the model it started from.

        Adapters are merged into the weights, and are by themselves in its subfolder adapter.
        """
        full = _keep(self.weights())
        if torch.distributed.get_rank() == 0:
            write_folder(Path(self._spec.model), folder, full)
        torch.distributed.barrier()
        if self._spec.lora is not None:
            self.write_adapter(folder / "adapter")

    def write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's format.

        Raises:
            ModelError: all weights are trained, and there are no adapters.
        """
        if self._spec.lora is None:
            raise ModelError(f"{folder}: nothing written; the policy trains all weights and has no adapter")
        full = _keep(self.adapter())
        if torch.distributed.get_rank() == 0:
            write_adapter(folder, self._spec.model, self._spec.lora, full)
        torch.distributed.barrier()


def _joined(stream: Iterator[tuple[str, list[Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, whole(blocks)) for name, blocks in stream)


def _keep(stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of a stream on the CPU of rank 0; nothing on the others, which drain it."""
    writer = torch.distributed.get_rank() == 0
    return {name: tensor.cpu().contiguous() for name, tensor in stream if writer}
