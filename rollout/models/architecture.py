"""Model architecture: the one reader of a Hugging Face config.json, and the shapes of published models by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rollout.base.errors import ModelError
from rollout.base.json_files import read_json
from rollout.base.yaml_files import read_yaml

if TYPE_CHECKING:  # a config.json is read without torch
    from torch import Tensor

MODEL_FAMILIES = {  # model_type -> (biases of queries, keys and values; norms of queries and keys)
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
_SPARSE = ("qwen3_moe",)
# settings that must be absent or false
_REFUSED = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: the feed-forward part of the sparse layers; there is no shared expert."""

    count: int  # E, of one layer
    per_token: int  # k, that see a token
    ffn: int  # of one expert
    normalised: bool  # the k probabilities are scaled to a sum of 1; else they are what softmax over all E gives
    sparse: tuple[bool, ...]  # by layer; the others have a dense feed-forward part

    @property
    def number_bytes(self) -> int:
        """Of an expert's number where it is written down, little-endian; all bits set stand for none."""
        return 1 if self.count < 256 else 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Experts:
        """From the config.json of a Qwen3-MoE, as transformers 4 or 5 writes it."""
        # transformers 5 writes the count under the name that all its mixtures share
        count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
        dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        return cls(
            count=count,
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            normalised=config.get("norm_topk_prob", False),
            sparse=tuple(
                layer not in dense and (layer + 1) % step == 0
                for layer in range(config["num_hidden_layers"])
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder with grouped-query attention, rotary positions and gated MLPs, dense or mixtures of experts.

    A checkpoint's fingerprint holds every field by its name.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # feed-forward width
    vocab: int
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None = (
        None  # by which Llama 3 stretches long wavelengths; None: plain rotary positions
    )
    rope_bands: tuple[float, float, int] | None = (
        None  # Llama 3's low and high frequency factor, original positions
    )
    positions: int
    init_std: float = 0.02  # of random weights
    experts: Experts | None = None  # None: every layer is dense

    def vocab_padded(self, tp: int) -> int:
        """Rows of the embedding once it divides by `tp`."""
        return -(-self.vocab // tp) * tp

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(rows, inputs) of every projection of a dense layer, uncut."""
        queries, values = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (queries, self.hidden),
            "k": (values, self.hidden),
            "v": (values, self.hidden),
            "o": (self.hidden, queries),
            "gate": (self.ffn, self.hidden),
            "up": (self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    def inverse_frequencies(self) -> Tensor:
        """Radians per position of each rotated pair, float32 [head_dim / 2]."""
        import torch

        exponent = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        frequencies: Tensor = 1.0 / (self.rope_theta**exponent)
        if self.rope_factor is None or self.rope_bands is None:
            return frequencies
        # Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        low, high, original = self.rope_bands
        turns = original * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        scaled: Tensor = kept * frequencies + (1 - kept) * frequencies / self.rope_factor
        return scaled


def read_config(folder: Path | str) -> dict[str, Any]:
    """The content of `folder`/config.json; ModelError if the file is missing or no JSON object."""
    path = Path(folder) / "config.json"
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no model here (config.json is missing); expected a Hugging Face folder"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path}: not readable ({error}); expected a Hugging Face model folder"
        ) from error


def tensor_files(folder: Path | str) -> list[Path]:
    """The safetensors files of a folder: what its index names, else all; ModelError if none is named or there."""
    index = Path(folder) / "model.safetensors.index.json"
    try:
        named = (
            read_json(index)["weight_map"].values()
            if index.is_file()
            else Path(folder).glob("*.safetensors")
        )
        files = {index.with_name(Path(name).name) for name in named}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index}: not readable ({error}); expected the files of a model's tensors"
        ) from error
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face model folder")
    return sorted(files)


def open_tensors(file: Path, kind: str) -> Any:
    """A safetensors file by its header, for tensors of a `kind` ("pt", "np"); ModelError if it is none or cut off."""
    try:
        return safe_open(str(file), kind)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error})") from error


def read_architecture(folder: Path | str) -> Architecture:
    """Read `folder`/config.json, as written by transformers 4 or 5."""
    return architecture_of(read_config(folder), f"{Path(folder) / 'config.json'}")


def architecture_of(config: Mapping[str, Any], where: str) -> Architecture:
    """The sizes in the content of a config.json; `where` is named in errors.

    Raises:
        ModelError: it describes another kind of model, or lacks a key.
    """
    family = config.get("model_type")
    if family not in MODEL_FAMILIES:
        raise ModelError(
            f"{where}: model_type '{family}' is not supported; known: {', '.join(MODEL_FAMILIES)}"
        )
    refused = [key for key in _REFUSED if config.get(key)]
    if refused or config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{where}: {refused[0] if refused else 'hidden_act'} is set; it is not supported here"
        )
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ModelError(
            f"{where}: layer_types has more than full_attention; it is not supported here"
        )
    qkv_bias, qk_norm = MODEL_FAMILIES[family]
    theta, factor, bands = _rope(config, where)
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
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factor=factor,
            rope_bands=bands,
            positions=config["max_position_embeddings"],
            init_std=config.get("initializer_range", 0.02),
            experts=Experts.of(config) if family in _SPARSE else None,
        )
    except KeyError as error:
        raise ModelError(f"{where}: no key {error}; expected a Hugging Face config.json") from error


def _rope(
    config: Mapping[str, Any], where: str
) -> tuple[float, float | None, tuple[float, float, int] | None]:
    """(theta, Llama 3's factor, its bands) of rotary positions, which have had three places in a config.json."""
    given = {"rope_theta": config.get("rope_theta", 1e4)}
    given |= config.get("rope_scaling") or {}
    given |= config.get("rope_parameters") or {}
    kind = (
        given.get("rope_type") or given.get("type") or "default"
    )  # `type` before transformers 4.43
    if kind == "default":
        return given["rope_theta"], None, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type '{kind}' is not supported; known: default, llama3")
    missing = [key for key in _LLAMA3 if key not in given]
    if missing:
        raise ModelError(f"{where}: rope_type 'llama3' needs {missing[0]}")
    factor, *bands = (given[key] for key in _LLAMA3)
    return given["rope_theta"], factor, (bands[0], bands[1], bands[2])


@cache
def published_shapes() -> dict[str, Any]:
    """The table: columns, a row for each of `models`, names that are `like` one, and those whose shape is `assumed`."""
    table: dict[str, Any] = read_yaml(Path(__file__).with_name("published.yaml"))
    return table


def planned_architecture(folder: str) -> Architecture:
    """The sizes in `folder`/config.json, or where the folder is not there, of the published model of its name.

    Raises:
        ModelError: there is neither, or the config.json describes another kind of model.
    """
    if (Path(folder) / "config.json").is_file():
        return read_architecture(folder)
    table = published_shapes()
    plain = Path(folder).name.removesuffix("-Instruct").removesuffix("-Base")
    row = table["models"].get(table["like"].get(plain, plain))
    if row is None:
        known = ", ".join([*table["models"], *table["like"]])
        raise ModelError(
            f"{folder}: no config.json here, and no published model of this name; known: {known}"
        )
    return architecture_of(dict(zip(table["columns"], row, strict=True)), folder)
