"""Low-rank adapters on a Hugging Face model in plain torch, equal to those of PEFT."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

RANK = 3
ALPHA = 6.0
_PREFIX = "base_model.model."


class Lora(torch.nn.Module):
    """Linear layer W x + bias + alpha / rank · B A x; only A and B train."""

    def __init__(self, base: torch.nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.lora_A = torch.nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = torch.nn.Linear(RANK, base.out_features, bias=False)
        with torch.no_grad():
            # B is not zero, so that A has a gradient from the first step.
            for factor in (self.lora_A, self.lora_B):
                values = torch.randn(factor.weight.shape, generator=generator)
                factor.weight.copy_(values * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / RANK * self.lora_B(self.lora_A(x))

    def merged(self) -> Tensor:
        """Return the weight of one plain linear layer that computes the same."""
        return self.base.weight + ALPHA / RANK * self.lora_B.weight @ self.lora_A.weight


def adapt(model: transformers.PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Freeze `model`, and add random trainable adapters to `targets` (q, k, ...).

    A critic's head stays trainable.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child.removesuffix("_proj") in targets and isinstance(module, torch.nn.Linear):
            setattr(model.get_submodule(parent), child, Lora(module, generator))
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


def save(model: transformers.PreTrainedModel, targets: tuple[str, ...], folder: Path) -> None:
    """Write the adapters in PEFT's format."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": [f"{target}_proj" for target in targets],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor for name, tensor in tensors_of(model).items() if name.startswith(_PREFIX)
    }
    save_file(tensors, str(folder / "adapter_model.safetensors"))


def name_of(parameter: str) -> str:
    """Return the name of a parameter in a Hugging Face folder, or of an adapter in PEFT's."""
    return _PREFIX + parameter if ".lora_" in parameter else parameter.replace(".base.", ".")


def tensors_of(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Return all weights by Hugging Face name, adapters merged, and the adapters by PEFT name."""
    tensors = {name_of(name): p.detach().clone() for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, Lora):
            tensors[f"{name}.weight"] = module.merged().detach().clone()
    return tensors
