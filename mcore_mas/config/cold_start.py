"""Section of a config about the cold start: a small model, and its fine-tuning on demonstrations."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollout.base.section import Section


class BaseModelConfig(Section):
    """Sizes of a small, randomly initialized model and of its tokenizer; the model of a cold start is a Qwen2."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=8)
    # Maximum number of tokens of the vocabulary, including 256 bytes and the special tokens.
    vocab: int = Field(ge=300)
    # Longest sequence in tokens.
    positions: int = Field(1024, ge=16)
    # "words": a token is at most a word, with the space before it; "phrases": it may also be several words. A digit is
    # always a token of its own.
    tokens: Literal["words", "phrases"] = "words"

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        # A head has hidden / heads dimensions, which rotary positions take in pairs.
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: "
                "hidden must be an even multiple of heads, and heads a multiple of kv_heads"
            )
        return self

    @property
    def transformers_settings(self) -> dict[str, Any]:
        """Sizes of the model by their names in transformers; `init_model` sets `vocab_size` to the tokenizer's size."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": True,
        }


class ColdStartConfig(Section):
    """Supervised fine-tuning on generated demonstrations.

    It ends early enough to leave reinforcement learning something to improve: when most turns are
    well-formed, and some trajectories are successful. At the latest it ends after `max_steps`.
    """

    base: BaseModelConfig
    # Options of the demonstrations that `data.generator` makes.
    options: dict[str, Any] = Field(default_factory=dict)
    # Learning rate after the warm-up.
    lr: float = Field(gt=0)
    warmup_steps: int = Field(50, ge=0)
    # Demonstrations per step.
    batch: int = Field(64, ge=1)
    max_steps: int = Field(ge=1)
    # Steps between two measurements of the team; it is also measured at the last step.
    check_every: int = Field(50, ge=1)
    # Step before which nothing is measured.
    first_check: int = Field(0, ge=0)
    # Validation tasks of a measurement.
    check_tasks: int = Field(64, ge=1)
    # The cold start ends once a measurement reaches this share of well-formed turns and stop_accuracy.
    stop_legal: float = Field(0.9, ge=0, le=1)
    # Share of successful trajectories that the same measurement must reach.
    stop_accuracy: float = Field(0.3, ge=0, le=1)
