"""Adapters on disk, in the format of Hugging Face's PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.models import ModelError
from mcore_mas.megatron.sources import SafeTensors
from mcore_mas.megatron.spec import LoraSpec

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
# what would make an adapter another function than W + alpha / rank · B A, with the values that do not
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
}


class AdapterFolder(SafeTensors):
    """Lazy access by PEFT name to the tensors of an adapter."""

    def __init__(self, folder: Path, lora: LoraSpec) -> None:
        """Open `folder`, which must hold what `lora` describes.

        Raises:
            ModelError: it holds no adapter, or another kind of one.
        """
        config, tensors = folder / _CONFIG, folder / _TENSORS
        for file in (config, tensors):
            if not file.is_file():
                raise ModelError(f"{folder}: no adapter here ({file.name} is missing); expected a folder as PEFT saves")
        _check(config, json.loads(config.read_text()), lora)
        with safe_open(str(tensors), "pt") as held:
            super().__init__(folder, dict.fromkeys(held.keys(), _TENSORS))


def _check(path: Path, config: dict[str, Any], lora: LoraSpec) -> None:
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise ModelError(f"{path}: {key} {config[key]!r} is not supported; expected {plain[0]!r}")
    targets = config.get("target_modules")
    named = sorted(str(module).rpartition(".")[2] for module in targets) if isinstance(targets, list) else targets
    for key, got, want in (
        ("r", config.get("r"), lora.rank),
        ("lora_alpha", config.get("lora_alpha"), lora.alpha),
        ("target_modules", named, sorted(f"{target}_proj" for target in lora.targets)),
    ):
        if got != want:
            raise ModelError(f"{path}: {key} is {got}, but the policy's lora section says {want}; make them equal")


def write_adapter(folder: Path, base: str, lora: LoraSpec, tensors: dict[str, Tensor]) -> None:
    """Write an adapter of the model in folder `base`, complete or not at all.

    Args:
        tensors: full tensors by PEFT name.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(f"{target}_proj" for target in lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / _CONFIG).write_text(json.dumps(config, indent=2))
    save_file(tensors, str(partial / _TENSORS), metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
