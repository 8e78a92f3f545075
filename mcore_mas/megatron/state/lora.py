"""Low-rank adapters (LoRA, arXiv 2106.09685) of Megatron's linear layers; files in PEFT's format."""

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
from rollout.base.json_files import read_json
from rollout.models.adapter_weights import ADAPTER_FILES
from rollout.models.architecture import Architecture
from rollout.records.seeds import derive_seed

# Last part of the name of an adapter's tensor in PEFT's format.
_PEFT_NAME = re.compile(r"\.(?P<projection>\w+)_proj\.lora_(?P<factor>[AB])\.weight$")

# Settings of PEFT with which an adapter could compute another function than
# W + alpha / rank · B A, and their supported values, PEFT's default first.
_SUPPORTED_SETTINGS: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
}


class Adapter(torch.nn.Module):
    """Factors A and B for each adapted projection that a parallel linear layer fuses.

    The adapter adds scale · B A x to the output of the layer. If tensor parallelism splits the
    layer's outputs (`linear_qkv`, `linear_fc1`), every rank has the whole A and some rows of B. If
    it splits the layer's inputs (`linear_proj`, `linear_fc2`), every rank has some columns of A and
    the whole B. Ranks exchange only A x, which is `rank` wide.

    Attributes:
        enabled: False to leave the output of the layer as it is.
    """

    def __init__(
        self,
        linear: Any,
        *,
        rows: Mapping[str, int],
        groups: int,
        inputs_are_split: bool,
        lora: LoraConfig,
    ) -> None:
        """Create factors of zeros, into which an initial or a saved adapter is loaded.

        Args:
            linear: the `ColumnParallelLinear` or `RowParallelLinear` that is adapted.
            rows: number of rows of each projection on this rank, in the layer's order.
            groups: how often that order repeats among the layer's rows; Megatron interleaves the
                queries, keys and values of each key/value head.
            inputs_are_split: True if tensor parallelism splits the inputs, False if the outputs.
            lora: rank, scale and target projections.
        """
        super().__init__()
        self.enabled = True
        self._rows = rows
        self._groups = groups
        self._inputs_are_split = inputs_are_split
        self._scale = lora.scale
        self._sequence_parallel = linear.config.sequence_parallel
        self._targets = [name for name in rows if name in lora.targets]

        # The factors are parameters of this module, which is called, and not of a submodule: the
        # distributed optimizer gathers a module's weights when that module is called.
        weight = linear.weight
        for name in self._targets:
            a = weight.new_zeros(lora.rank, weight.shape[1])
            b = weight.new_zeros(rows[name], lora.rank)
            self.register_parameter(f"a_{name}", Parameter(a))
            self.register_parameter(f"b_{name}", Parameter(b))

        # Split inputs are columns of A, and split outputs are rows of B.
        split_factors = self.a if inputs_are_split else self.b
        whole_factors = self.b if inputs_are_split else self.a
        split_dimension = 1 if inputs_are_split else 0
        # Megatron takes a shard without a mark for a duplicate, and leaves it out of the
        # gradient norm.
        for factor in split_factors.values():
            set_tensor_model_parallel_attributes(factor, True, split_dimension, 1)
        # With sequence parallelism a rank computes a whole factor's gradient from its own tokens
        # only. This mark makes Megatron sum the gradient over ranks.
        for factor in whole_factors.values():
            factor.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]

    @property
    def a(self) -> dict[str, Tensor]:
        """Factor A of each adapted projection, [rank, inputs of this rank]."""
        return {name: self.get_parameter(f"a_{name}") for name in self._targets}

    @property
    def b(self) -> dict[str, Tensor]:
        """Factor B of each adapted projection, [rows of this rank, rank]."""
        return {name: self.get_parameter(f"b_{name}") for name in self._targets}

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · B A x [T, 1, rows] for the layer's input [T, 1, inputs] on this rank."""
        factors_b = self.b
        low_rank = F.linear(x, torch.cat(list(self.a.values()))) * self._scale
        parts = self._exchange(low_rank).chunk(len(factors_b), dim=-1)
        outputs = {
            name: F.linear(part, b)
            for (name, b), part in zip(factors_b.items(), parts, strict=True)
        }
        return fuse_projections(outputs, rows=self._rows, groups=self._groups)

    def add_to_output(
        self,
        _linear: torch.nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        """Forward hook of the linear layer, which returns its output and a bias or None."""
        if not self.enabled:
            return None
        out, bias = output
        return out + self(inputs[0]), bias

    def merged_delta(self) -> Tensor:
        """Return scale · B A [rows, inputs] in float32, which is added to this rank's weight."""
        with torch.no_grad():
            factors_b = self.b
            # `fuse_projections` joins outputs along the last dimension, so it gets transposes.
            products = {
                name: (factors_b[name].float() @ a.float()).t() for name, a in self.a.items()
            }
            return (
                fuse_projections(products, rows=self._rows, groups=self._groups).t() * self._scale
            )

    def _exchange(self, low_rank: Tensor) -> Any:
        """Return A x of the tokens that B is multiplied with on this rank.

        In the backward pass, the ranks' parts of the gradient of A x are summed.
        """
        if self._inputs_are_split and self._sequence_parallel:
            # Each rank has multiplied A with its own inputs; the sum over ranks is A x.
            return mappings.reduce_scatter_to_sequence_parallel_region(low_rank)
        if self._inputs_are_split:
            return mappings.reduce_from_tensor_model_parallel_region(low_rank)
        if self._sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(
                low_rank, tensor_parallel_output_grad=True
            )
        return mappings.copy_to_tensor_model_parallel_region(low_rank)


def fuse_projections(
    outputs: Mapping[str, Tensor], *, rows: Mapping[str, int], groups: int
) -> Tensor:
    """Join the outputs of projections in the order of the layer that fuses them.

    Args:
        outputs: [..., rows] of at least one projection; those of the other projections are 0.
        rows: number of rows of each projection, in the layer's order.
        groups: how often that order repeats among the layer's rows.

    Returns:
        [..., rows of all projections]
    """
    some_output = next(iter(outputs.values()))
    leading_shape = some_output.shape[:-1]
    parts = []
    for name, row_count in rows.items():
        output = outputs.get(name)
        if output is None:
            output = some_output.new_zeros(*leading_shape, row_count)
        parts.append(output.unflatten(-1, (groups, -1)))
    return torch.cat(parts, dim=-1).flatten(-2)


def attach_adapters(decoder: PackedGPTModel, architecture: Architecture, spec: TrainerSpec) -> None:
    """Add adapters to the linear layers of a pipeline stage, and freeze all its other weights.

    The value head of a critic is not frozen.

    Raises:
        ModelError: a layer of the model lacks a linear layer with target projections.
    """
    lora = spec.lora
    assert lora is not None
    decoder.requires_grad_(False)
    for layer in decoder.decoder.layers:
        for path, (_, projections, inputs_are_split) in LINEARS.items():
            targets = sorted(set(projections) & set(lora.targets))
            if not targets:
                continue
            try:
                linear = layer.get_submodule(path)
            except AttributeError:
                raise ModelError(
                    f"{spec.model}: lora.targets {', '.join(targets)}: a layer of this model has no "
                    f"{path}; remove them from lora.targets"
                ) from None
            ranks = 1 if inputs_are_split else spec.tp
            adapter = Adapter(
                linear,
                rows={name: architecture.projections[name][0] // ranks for name in projections},
                groups=architecture.kv_heads // spec.tp if "q" in projections else 1,
                inputs_are_split=inputs_are_split,
                lora=lora,
            )
            linear.add_module("adapter", adapter)
            linear.register_forward_hook(adapter.add_to_output)

    if decoder.post_process and spec.head == "value":
        decoder.output_layer.value.requires_grad_(True)
    if decoder.pre_process and spec.recompute != "none":
        # A recomputed layer is trained only if its input requires a gradient, and the output of a
        # frozen embedding does not.
        decoder.embedding.register_forward_hook(
            lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled())
        )


def adapters_by_weight(decoder: PackedGPTModel) -> dict[str, Adapter]:
    """Return the adapters of a pipeline stage by Megatron's name of the weight that they adapt."""
    return {
        decoder.numbered(name).removesuffix("adapter") + "weight": module
        for name, module in decoder.named_modules()
        if isinstance(module, Adapter)
    }


def initial_adapter(architecture: Architecture, rank: int, seed: int, name: str) -> LazyTensor:
    """Return a full tensor of a new adapter: A uniform in ±1/√inputs, as in PEFT; B zero.

    A depends on the seed and the name alone, so every layout starts from the same adapter.

    Args:
        architecture: architecture of the adapted model.
        rank: rank of the adapter.
        seed: seed of A.
        name: name of the tensor, in PEFT's format.
    """
    match = _PEFT_NAME.search(name)
    assert match is not None
    rows, inputs = architecture.projections[match["projection"]]
    if match["factor"] == "B":
        return LazyTensor.of(torch.zeros(rows, rank))
    generator_seed = derive_seed(seed, name) >> 1  # torch takes 63 bits
    generator = torch.Generator().manual_seed(generator_seed)
    uniform = torch.rand(rank, inputs, generator=generator)  # in [0, 1)
    return LazyTensor.of((uniform * 2 - 1) / math.sqrt(inputs))


class AdapterFolder(SafeTensors):
    """Tensors of an adapter in PEFT's format, by PEFT's names; only slices that are read are loaded."""

    def __init__(self, folder: Path, lora: LoraConfig) -> None:
        """Open a folder.

        Args:
            folder: saved by PEFT.
            lora: expected rank, alpha and target projections.

        Raises:
            ModelError: the folder has no adapter, or one of another kind than `lora` describes.
        """
        config_file, tensor_file = (folder / name for name in ADAPTER_FILES)
        for file in (config_file, tensor_file):
            if not file.is_file():
                raise ModelError(
                    f"{folder}: no adapter here ({file.name} is missing); expected a folder saved by PEFT"
                )
        try:
            settings = dict(read_json(config_file))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{config_file}: not readable ({error}); expected a folder saved by PEFT"
            ) from error
        for key, supported in _SUPPORTED_SETTINGS.items():
            if settings.get(key, supported[0]) not in supported:
                raise ModelError(
                    f"{config_file}: {key} {settings[key]!r} is not supported; expected {supported[0]!r}"
                )

        target_modules = settings.get("target_modules")
        if isinstance(target_modules, list):
            # PEFT accepts the last part of a module's path or the whole path.
            target_modules = sorted(str(module).rpartition(".")[2] for module in target_modules)
        actual = {
            "r": settings.get("r"),
            "lora_alpha": settings.get("lora_alpha"),
            "target_modules": target_modules,
        }
        expected = {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": sorted(f"{target}_proj" for target in lora.targets),
        }
        for key, value in actual.items():
            if value != expected[key]:
                raise ModelError(
                    f"{config_file}: {key} is {value}, but the policy's lora section says "
                    f"{expected[key]}; make them equal"
                )
        super().__init__(folder, tensor_file)
