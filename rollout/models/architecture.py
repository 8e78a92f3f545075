"""Architecture of a model, read from the config.json of its Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.base.errors import ModelError
from rollout.base.json_files import read_json

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

# Settings that rope_type "llama3" needs.
_LLAMA3_SETTINGS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


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
    def number_bytes(self) -> int:
        """Bytes of an expert's number in a recorded routing, as an unsigned little-endian integer.

        The largest integer of this size means that the expert is not known.
        """
        return 1 if self.count < 256 else 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Experts:
        """Read the experts from the config.json of a Qwen3-MoE, as transformers 4 or 5 writes it.

        Raises:
            KeyError: a setting is missing.
        """
        # transformers 5 uses the name "num_local_experts" for all model types.
        count_key = "num_experts" if "num_experts" in config else "num_local_experts"
        dense_layers = config.get("mlp_only_layers") or []
        sparse_step = config.get("decoder_sparse_step", 1)
        sparse = tuple(
            layer not in dense_layers and (layer + 1) % sparse_step == 0
            for layer in range(config["num_hidden_layers"])
        )
        return cls(
            count=config[count_key],
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            normalised=config.get("norm_topk_prob", False),
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
        """(rows, inputs) of each projection's full weight in a dense layer."""
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
    if model_type not in MODEL_FAMILIES:
        raise ModelError(
            f"{where}: model_type '{model_type}' is not supported; "
            f"known: {', '.join(MODEL_FAMILIES)}"
        )
    _check_supported(config, where)
    family = MODEL_FAMILIES[model_type]
    rope = _RotaryPositions.from_config(config, where)
    try:
        heads = config["num_attention_heads"]
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_factor=rope.factor,
            rope_bands=rope.bands,
            positions=config["max_position_embeddings"],
            init_std=config.get("initializer_range", 0.02),
            experts=Experts.from_config(config) if family.is_mixture else None,
        )
    except KeyError as error:
        raise ModelError(
            f"{where}: there is no key {error}; expected a Hugging Face config.json"
        ) from error


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError if a config.json has a setting that this package does not implement."""
    unsupported = [key for key in _UNSUPPORTED_SETTINGS if config.get(key)]
    if unsupported:
        raise ModelError(f"{where}: {unsupported[0]} is set, which is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act '{activation}' is not supported; known: silu")
    if any(layer_type != "full_attention" for layer_type in config.get("layer_types") or ()):
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
        settings = {"rope_theta": config.get("rope_theta", 1e4)}
        settings |= config.get("rope_scaling") or {}  # transformers 4
        settings |= config.get("rope_parameters") or {}  # transformers 5

        # Before transformers 4.43 the key was "type".
        rope_type = settings.get("rope_type") or settings.get("type") or "default"
        theta = settings["rope_theta"]
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type != "llama3":
            raise ModelError(
                f"{where}: rope_type '{rope_type}' is not supported; known: default, llama3"
            )
        missing = [key for key in _LLAMA3_SETTINGS if key not in settings]
        if missing:
            raise ModelError(f"{where}: rope_type 'llama3' needs {missing[0]}")

        bands = (
            settings["low_freq_factor"],
            settings["high_freq_factor"],
            settings["original_max_position_embeddings"],
        )
        return cls(theta=theta, factor=settings["factor"], bands=bands)
