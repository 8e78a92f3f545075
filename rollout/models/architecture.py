"""The shape of a supported decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.base.errors import EngineError

FAMILIES = {  # model_type -> what its attention has
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "llama": {"qkv_bias": False, "qk_norm": False},
}
ROPES = {  # rope_type -> its own numbers
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_REFUSED = ("attention_bias", "mlp_bias", "use_sliding_window")  # settings that must be absent or false


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a dense decoder with grouped-query attention, rotary positions and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Mapping[str, Any]  # rope_type, rope_theta and the type's own numbers
    tied: bool  # the output head is the embedding
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """Read `folder`/config.json.

        Raises:
            EngineError: the file is missing or describes a model that this decoder does not compute.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: not readable ({error}); expected a Hugging Face model folder") from error
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Architecture:
        """Take the sizes from the content of a config.json; `where` is named in errors."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise EngineError(f"{where}: model_type '{family}' is not supported; known: {', '.join(sorted(FAMILIES))}")
        refused = [key for key in _REFUSED if config.get(key)]
        if refused or config.get("hidden_act", "silu") != "silu":
            raise EngineError(
                f"{where}: {refused[0] if refused else 'hidden_act'} is set; this engine does not support it"
            )
        if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            raise EngineError(f"{where}: layer_types has more than full_attention; this engine does not support it")
        rope = _rope(config, where)
        try:
            heads = config["num_attention_heads"]
            return cls(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                norm_eps=config.get("rms_norm_eps", 1e-6),
                rope=rope,
                tied=config.get("tie_word_embeddings", False),
                **FAMILIES[family],
            )
        except KeyError as error:
            raise EngineError(f"{where}: no key {error}; expected a Hugging Face config.json") from error

    def inverse_frequencies(self) -> Tensor:
        """Radians per position of each rotated pair, float32 [head_dim / 2]."""
        exponent = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        frequencies: Tensor = 1.0 / (self.rope["rope_theta"] ** exponent)
        if self.rope.get("rope_type", "default") == "default":
            return frequencies
        # Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        factor, low, high, original = (self.rope[key] for key in ROPES["llama3"])
        turns = original * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        scaled: Tensor = kept * frequencies + (1 - kept) * frequencies / factor
        return scaled


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_type, rope_theta and the type's own numbers, which have had three places in a config.json."""
    given = {"rope_theta": config.get("rope_theta", 1e4)}
    given |= config.get("rope_scaling") or {}
    given |= config.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"  # `type` before transformers 4.43
    if kind not in ROPES:
        raise EngineError(f"{where}: rope_type '{kind}' is not supported; known: {', '.join(ROPES)}")
    missing = [key for key in ROPES[kind] if key not in given]
    if missing:
        raise EngineError(f"{where}: rope_type '{kind}' needs {missing[0]}")
    return {"rope_type": kind, "rope_theta": given["rope_theta"]} | {key: given[key] for key in ROPES[kind]}
