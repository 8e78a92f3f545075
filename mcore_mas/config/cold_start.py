"""Cold-start section of a config: the small model that a run makes for itself, and its supervised fine-tuning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollout.base.options import Section


class BaseModelConfig(Section):
    """A small randomly initialised Qwen2 and the size of its tokenizer."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=8)
    vocab: int = Field(ge=300)  # 256 bytes and the special tokens are always in it
    positions: int = Field(1024, ge=16)
    tokens: Literal["words", "phrases"] = "words"  # the largest text that may become one token; digits never join

    @model_validator(mode="after")
    def _divides(self) -> BaseModelConfig:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: "
                "heads must divide hidden, and kv_heads must divide heads"
            )
        return self


class ColdStartConfig(Section):
    """Supervised fine-tuning on generated demonstrations, until the team is legal but far from its ceiling."""

    base: BaseModelConfig
    options: dict[str, Any] = Field(default_factory=dict)  # of the generator's demonstrations
    lr: float = Field(gt=0)
    warmup_steps: int = Field(50, ge=0)
    batch: int = Field(64, ge=1)  # demonstrations per step
    max_steps: int = Field(ge=1)
    check_every: int = Field(50, ge=1)  # steps between two measurements of the team
    first_check: int = Field(0, ge=0)  # no measurement before this step
    check_tasks: int = Field(64, ge=1)  # validation tasks of one measurement
    stop_legal: float = Field(0.9, ge=0, le=1)  # stop when this share of turns is well-formed ...
    stop_accuracy: float = Field(0.3, ge=0, le=1)  # ... and this share of trajectories succeeds
