"""Weights of a low-rank adapter (LoRA), in buffers and as files of PEFT."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rollout.base.files import atomic_folder
from rollout.models.architecture import Architecture
from rollout.models.layout import Projection
from rollout.models.named_buffers import (
    BufferAllocator,
    NamedBuffer,
    NamedBuffers,
    in_hugging_face_order,
)

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT names them
_MLP_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Low-rank adapter of some projections of every layer: W + scale · B A."""

    rank: int
    scale: float
    targets: tuple[Projection, ...]


class AdapterWeights(NamedBuffers):
    """Weights of one adapter, by their names in PEFT.

    Attributes:
        layers: (A [rank, inputs], B [rows, rank]) by projection, for each layer; the rows of B are
            in the order of `LayerWeights`.
    """

    def __init__(self, architecture: Architecture, adapter: AdapterShape, storage: Tensor) -> None:
        """Lay the buffers out in `storage`: a flat tensor of `elements` numbers or `META_STORAGE`."""
        allocator = BufferAllocator(storage)
        self.layers: list[dict[Projection, tuple[Tensor, Tensor]]] = []
        self.buffers: dict[str, NamedBuffer] = {}
        for number in range(architecture.layers):
            layer: dict[Projection, tuple[Tensor, Tensor]] = {}
            for projection in adapter.targets:
                rows, inputs = architecture.projections[projection]
                a = allocator.allocate(adapter.rank, inputs)
                b = allocator.allocate(rows, adapter.rank)
                layer[projection] = (a, b)

                b_view = b
                if projection in ("q", "k"):
                    b_view = in_hugging_face_order(b, architecture.head_dim)
                block = "mlp" if projection in _MLP_PROJECTIONS else "self_attn"
                prefix = f"base_model.model.model.layers.{number}.{block}.{projection}_proj"
                self.buffers[f"{prefix}.lora_A.weight"] = NamedBuffer(shape=a.shape, view=a)
                self.buffers[f"{prefix}.lora_B.weight"] = NamedBuffer(shape=b.shape, view=b_view)
            self.layers.append(layer)
        self.elements = allocator.used


def write_peft(
    folder: Path,
    base: str,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    targets: Iterable[str],
) -> None:
    """Write an adapter in PEFT's format; the folder appears once it is complete.

    Args:
        folder: folder to write.
        base: folder of the model that is adapted.
        tensors: full tensors by their names in PEFT.
        rank: rank of the adapter.
        alpha: PEFT's `lora_alpha`: the rank times the scale of the adapter.
        targets: projections that are adapted.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(f"{target}_proj" for target in targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    config_name, tensors_name = ADAPTER_FILES
    with atomic_folder(folder) as partial_folder:
        (partial_folder / config_name).write_text(json.dumps(config, indent=2))
        save_file(dict(tensors), str(partial_folder / tensors_name), metadata={"format": "pt"})
