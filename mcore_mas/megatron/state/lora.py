"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) beside Megatron's linear layers, on disk as PEFT's."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Parameter

from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.tensor_sources import LazyTensor, SafeTensors
from mcore_mas.megatron.state.weight_import import LINEARS
from rollout.base.errors import ModelError
from rollout.models.adapter_weights import ADAPTER_FILES
from rollout.models.architecture import Architecture
from rollout.records.seeds import derive_seed

_PEFT = re.compile(r"\.(\w+)_proj\.lora_([AB])\.weight$")


class Adapter(torch.nn.Module):
    """Adds scale · B A x to a parallel linear layer's output, with an A and a B for each projection it fuses.

    A layer whose rows are cut (`linear_qkv`, `linear_fc1`) has every A whole and each B cut by rows; one whose inputs
    are cut (`linear_proj`, `linear_fc2`) has A cut by inputs and B whole. What crosses ranks is `rank` wide.
    """

    def __init__(
        self,
        linear: Any,
        *,
        rows: Mapping[str, int],
        groups: int,
        inputs_cut: bool,
        lora: LoraConfig,
    ) -> None:
        """Stand beside `linear`, all zero, and add to its output from now on.

        Args:
            linear: a `ColumnParallelLinear` or `RowParallelLinear`.
            rows: of its projections on this rank, in the layer's order.
            groups: how often that order repeats in its rows: Megatron interleaves queries, keys and values.
            inputs_cut: whether tensor parallelism cuts the layer's inputs, and not its rows.
        """
        super().__init__()
        self._rows, self._groups, self._inputs_cut, self._scale = (
            rows,
            groups,
            inputs_cut,
            lora.scale,
        )
        self._sequence_parallel = linear.config.sequence_parallel
        self.on = True
        self._held = [name for name in rows if name in lora.targets]
        weight = linear.weight
        for x in (
            self._held
        ):  # of this module itself: Megatron gathers what it overlaps by module that is called
            self.register_parameter(
                f"a_{x}", Parameter(weight.new_zeros(lora.rank, weight.shape[1]))
            )
            self.register_parameter(f"b_{x}", Parameter(weight.new_zeros(rows[x], lora.rank)))
        cut, whole = (self.a, self.b) if inputs_cut else (self.b, self.a)
        for (
            parameter
        ) in cut.values():  # an unmarked shard is left out of the gradient norm as a duplicate
            set_tensor_model_parallel_attributes(parameter, True, 1 if inputs_cut else 0, 1)
        partial: Any
        for (
            partial
        ) in whole.values():  # sees its part of the sequence: Megatron sums its gradient over ranks
            partial.sequence_parallel = self._sequence_parallel
        linear.adapter = self
        linear.register_forward_hook(self._add)

    @property
    def a(self) -> dict[str, Tensor]:
        """Each projection's A [rank, inputs of this rank]."""
        return {x: self.get_parameter(f"a_{x}") for x in self._held}

    @property
    def b(self) -> dict[str, Tensor]:
        """Each projection's B [rows of this rank, rank]."""
        return {x: self.get_parameter(f"b_{x}") for x in self._held}

    def _add(
        self, _: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> object:
        return (output[0] + self(inputs[0]), output[1]) if self.on else None

    def forward(self, x: Tensor) -> Tensor:
        """What is added [T, 1, rows] for the layer's input [T, 1, inputs], both as this rank has them."""
        low = F.linear(x, torch.cat(list(self.a.values()))) * self._scale  # [T, 1, rank of all]
        parts = self._exchange(low).chunk(len(self._held), dim=-1)
        return self._fuse(
            {name: F.linear(part, b) for (name, b), part in zip(self.b.items(), parts, strict=True)}
        )

    def _exchange(self, low: Tensor) -> Any:
        """A x over the tokens that B is to see; backward, every rank's part of its gradient is summed."""
        if (
            self._inputs_cut and self._sequence_parallel
        ):  # each rank has A x of its inputs: the sum is A x
            return mappings.reduce_scatter_to_sequence_parallel_region(low)
        if self._inputs_cut:
            return mappings.reduce_from_tensor_model_parallel_region(low)
        if self._sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True
            )
        return mappings.copy_to_tensor_model_parallel_region(low)

    def _fuse(self, parts: Mapping[str, Tensor]) -> Tensor:
        """[..., rows of the layer] from projections' [..., rows], in the layer's order, zero where there is none."""
        some = next(iter(parts.values()))
        lead = some.shape[:-1]
        whole = [
            parts[x] if x in parts else some.new_zeros(*lead, rows)
            for x, rows in self._rows.items()
        ]
        return torch.cat(
            [part.unflatten(-1, (self._groups, -1)) for part in whole], dim=-1
        ).flatten(-2)

    def delta(self) -> Tensor:
        """scale · B A [rows, inputs] in float32, as this rank's part of the layer's weight."""
        with torch.no_grad():
            parts = {
                x: (b.float() @ a.float()).t()
                for (x, a), b in zip(self.a.items(), self.b.values(), strict=True)
            }
            return self._fuse(parts).t() * self._scale


def attach_adapters(decoder: PackedGPTModel, architecture: Architecture, spec: TrainerSpec) -> None:
    """Freeze a pipeline stage but for the adapters it gets, and for a critic's head.

    Raises:
        ModelError: the model has no such layer to adapt.
    """
    lora = spec.lora
    assert lora is not None
    decoder.requires_grad_(False)
    sizes = architecture.projections
    for layer in decoder.decoder.layers:
        for path, (_, names, inputs_cut) in LINEARS.items():
            if not set(names) & set(lora.targets):
                continue
            try:
                linear = layer.get_submodule(path)
            except AttributeError:
                told = ", ".join(sorted(set(names) & set(lora.targets)))
                raise ModelError(
                    f"{spec.model}: lora.targets {told}: a layer has no {path}; leave them out"
                ) from None
            rows: dict[str, int] = {
                name: sizes[name][0] // (1 if inputs_cut else spec.tp) for name in names
            }
            groups = architecture.kv_heads // spec.tp if "q" in names else 1
            Adapter(linear, rows=rows, groups=groups, inputs_cut=inputs_cut, lora=lora)
    if decoder.post_process and spec.head == "value":
        decoder.output_layer.value.requires_grad_(True)
    if decoder.pre_process and spec.recompute != "none":
        # what is recomputed trains only if its input asks for a gradient, and a frozen embedding's output does not
        decoder.embedding.register_forward_hook(
            lambda _, __, output: output.requires_grad_(torch.is_grad_enabled())
        )


def adapters(decoder: PackedGPTModel) -> dict[str, Adapter]:
    """A stage's adapters by the Megatron name of the weight that each adds to."""
    return {
        decoder.numbered(name).removesuffix("adapter") + "weight": module
        for name, module in decoder.named_modules()
        if isinstance(module, Adapter)
    }


def initial_adapter(architecture: Architecture, rank: int, seed: int, name: str) -> LazyTensor:
    """A new adapter's tensor by its PEFT name, uncut: A as PEFT draws it, uniform in ±1/√inputs; B zero.

    The draw depends on the seed and the name alone, so every layout starts the same.
    """
    found = _PEFT.search(name)
    assert found is not None
    rows, inputs = architecture.projections[found.group(1)]
    if found.group(2) == "B":
        return LazyTensor.of(torch.zeros(rows, rank))
    generator = torch.Generator().manual_seed(derive_seed(seed, name) >> 1)  # torch takes 63 bits
    return LazyTensor.of(
        (torch.rand(rank, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)
    )


# what would make an adapter another function than W + alpha / rank · B A, with the values that do not
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        ("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out"), (False, None)
    ),
    **dict.fromkeys(
        ("target_parameters", "trainable_token_indices", "modules_to_save"), (None, [])
    ),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    "layers_to_transform": (None, []),
}


class AdapterFolder(SafeTensors):
    """Lazy access by PEFT name to the tensors of an adapter."""

    def __init__(self, folder: Path, lora: LoraConfig) -> None:
        """Open `folder`, which must hold what `lora` describes.

        Raises:
            ModelError: it holds no adapter, or another kind of one.
        """
        config, tensors = (folder / name for name in ADAPTER_FILES)
        for file in (config, tensors):
            if not file.is_file():
                raise ModelError(
                    f"{folder}: no adapter here ({file.name} is missing); expected a folder as PEFT saves"
                )
        said = json.loads(config.read_text())
        for key, plain in _PLAIN.items():
            if said.get(key, plain[0]) not in plain:
                raise ModelError(
                    f"{config}: {key} {said[key]!r} is not supported; expected {plain[0]!r}"
                )
        if isinstance(said.get("target_modules"), list):
            said["target_modules"] = sorted(
                str(module).rpartition(".")[2] for module in said["target_modules"]
            )
        targets = sorted(f"{target}_proj" for target in lora.targets)
        for key, want in {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": targets,
        }.items():
            if (got := said.get(key)) != want:
                told = f"{key} is {got}, but the policy's lora section says {want}"
                raise ModelError(f"{config}: {told}; make them equal")
        super().__init__(folder, tensors)
