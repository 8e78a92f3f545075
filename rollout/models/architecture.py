"""Architecture of a model, read from the config.json of its Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.base.errors import ModelError
from rollout.base.json_files import read_json
from rollout.models.model_config import (
    ExpertsConfig,
    Llama3RopeConfig,
    RopeConfig,
    SizesConfig,
    read_values,
)

if TYPE_CHECKING:  # so that a config.json can be read without importing torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Properties of a `model_type` that its config.json does not state."""

    qkv_bias: bool = False  # query, key and value projections have biases
    qk_norm: bool = False  # queries and keys are normalised per head
    is_mixture: bool = False  # layers may have experts


MODEL_FAMILIES = {
    "llama": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True),
    "qwen3": ModelFamily(qk_norm=True),
    "qwen3_moe": ModelFamily(qk_norm=True, is_mixture=True),
}

# Settings of config.json that must be absent or false.
_UNSUPPORTED_SETTINGS = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts in the feed-forward part of sparse layers, without shared experts."""

    count: int  # experts per layer
    per_token: int  # experts that each token is routed to
    ffn: int  # intermediate width of one expert
    # True if the router's probabilities of the chosen experts are rescaled to a sum of 1; otherwise
    # they are used as the softmax over all experts gives them.
    normalised: bool
    sparse: tuple[bool, ...]  # by layer: True for experts, False for a dense feed-forward part

    @property
    def index_bytes(self) -> int:
        """Bytes per expert index in a recorded routing: an unsigned little-endian integer.

        The largest integer of this size means that the expert is unknown.
        """
        return 1 if self.count < 256 else 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Experts:
        """Read the experts from the config.json of a Qwen3-MoE, as transformers 4 or 5 writes it.

        The sizes that every model has (`SizesConfig`) must have been checked before.

        Raises:
            ModelError: a setting is missing, has another type or is out of bounds.
        """
        values = read_values(ExpertsConfig, config, where)
        sparse = tuple(
            layer not in values.mlp_only_layers and (layer + 1) % values.decoder_sparse_step == 0
            for layer in range(config["num_hidden_layers"])
        )
        return cls(
            count=values.num_experts,
            per_token=values.num_experts_per_tok,
            ffn=values.moe_intermediate_size,
            normalised=values.norm_topk_prob,
            sparse=sparse,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder with grouped-query attention, rotary positions and gated MLPs.

    Its layers are dense, or mixtures of experts. The fingerprint of a checkpoint contains every
    field under its name here.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # intermediate width of a dense feed-forward part
    vocab: int
    tied: bool  # the output layer shares the embedding's weight
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    # Scaling of rotary frequencies as in Llama 3; None for plain rotary positions.
    rope_factor: float | None = None
    # Low and high frequency factor of that scaling, and the original number of positions.
    rope_bands: tuple[float, float, int] | None = None
    positions: int  # longest sequence
    init_std: float = 0.02  # standard deviation of random initial weights
    experts: Experts | None = None  # None: every layer is dense

    def vocab_padded(self, tp: int) -> int:
        """Return the rows of the embedding, padded to a multiple of `tp`."""
        return -(-self.vocab // tp) * tp

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(rows, inputs) of the whole weight of each projection in a dense layer, before tensor parallelism."""
        query_rows = self.heads * self.head_dim
        kv_rows = self.kv_heads * self.head_dim
        return {
            "q": (query_rows, self.hidden),
            "k": (kv_rows, self.hidden),
            "v": (kv_rows, self.hidden),
            "o": (self.hidden, query_rows),
            "gate": (self.ffn, self.hidden),
            "up": (self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    def inverse_frequencies(self) -> Tensor:
        """Return the radians per position of each rotated pair, float32 [head_dim / 2]."""
        import torch

        exponent = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        frequencies: Tensor = 1.0 / (self.rope_theta**exponent)
        if self.rope_factor is None or self.rope_bands is None:
            return frequencies

        # Llama 3 divides the frequencies of long wavelengths by the factor, leaves those of short
        # wavelengths as they are, and interpolates between the two.
        low, high, original_positions = self.rope_bands
        rotations = original_positions * frequencies / (2 * math.pi)
        unscaled_share = ((rotations - low) / (high - low)).clamp(0, 1)
        scaled: Tensor = (
            unscaled_share * frequencies + (1 - unscaled_share) * frequencies / self.rope_factor
        )
        return scaled


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read `folder`/config.json.

    Raises:
        ModelError: the file is missing, or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no model here (config.json is missing); expected a Hugging Face folder"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path} is not readable ({error}); expected a Hugging Face model folder"
        ) from error


def read_architecture(folder: Path | str) -> Architecture:
    """Read the architecture from `folder`/config.json, as written by transformers 4 or 5.

    Raises:
        ModelError: the file is missing or not readable, lacks a setting, or describes a model that
            is not supported.
    """
    return parse_architecture(read_config(folder), f"{Path(folder) / 'config.json'}")


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Convert the content of a config.json to an architecture.

    Args:
        config: content of the file.
        where: path of the file or name of the model, for errors.

    Raises:
        ModelError: the content lacks a setting, or describes a model that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_FAMILIES:
        raise ModelError(
            f"{where}: model_type {model_type!r} is not supported; "
            f"known: {', '.join(MODEL_FAMILIES)}"
        )
    _check_supported(config, where)
    family = MODEL_FAMILIES[model_type]
    rope = _RotaryPositions.from_config(config, where)
    sizes = read_values(SizesConfig, config, where)
    return Architecture(
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_width,
        ffn=sizes.intermediate_size,
        vocab=sizes.vocab_size,
        tied=sizes.tie_word_embeddings,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=sizes.rms_norm_eps,
        rope_theta=rope.theta,
        rope_factor=rope.factor,
        rope_bands=rope.bands,
        positions=sizes.max_position_embeddings,
        init_std=sizes.initializer_range,
        experts=Experts.from_config(config, where) if family.is_mixture else None,
    )


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError if a config.json has a setting that this package does not implement."""
    unsupported = [key for key in _UNSUPPORTED_SETTINGS if config.get(key)]
    if unsupported:
        raise ModelError(f"{where}: {unsupported[0]} is set, which is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported; known: silu")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ModelError(
            f"{where}: layer_types is {layer_types!r}; expected a list with a name for each layer"
        )
    if any(layer_type != "full_attention" for layer_type in layer_types):
        raise ModelError(
            f"{where}: layer_types names other layers than full_attention, which are not supported"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RotaryPositions:
    """Settings of rotary positions, as fields of `Architecture`."""

    theta: float
    factor: float | None = None
    bands: tuple[float, float, int] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> _RotaryPositions:
        """Read the settings from any of the three places that transformers has used for them.

        Raises:
            ModelError: the rope_type is not supported, or one of its settings is missing.
        """
        settings: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
        for section in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
            values = config.get(section) or {}
            if not isinstance(values, Mapping):
                raise ModelError(f"{where}: {section} is {values!r}; expected an object, or null")
            settings |= values

        # Before transformers 4.43 the key was "type".
        rope_type = settings.get("rope_type") or settings.get("type") or "default"
        if rope_type == "default":
            return cls(theta=read_values(RopeConfig, settings, where).rope_theta)
        if rope_type != "llama3":
            raise ModelError(
                f"{where}: rope_type {rope_type!r} is not supported; known: default, llama3"
            )
        rope = read_values(Llama3RopeConfig, settings, f"{where}: rope_type 'llama3'")
        return cls(
            theta=rope.rope_theta,
            factor=rope.factor,
            bands=(
                rope.low_freq_factor,
                rope.high_freq_factor,
                rope.original_max_position_embeddings,
            ),
        )
