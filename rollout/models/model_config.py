"""Pydantic models of the values that are read from a Hugging Face config.json.

Each value has a type and bounds. `read_values` reads and checks the values of one such model.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from rollout.base.error_lines import error_line
from rollout.base.errors import ModelError

# Far above every published model. A larger size is a mistake that would only be found when the
# model's tensors do not fit into memory.
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_Heads = Annotated[int, Field(ge=1, le=1 << 16)]
_Experts = Annotated[int, Field(ge=1, le=1 << 15)]
_Width = Annotated[int, Field(ge=1, le=1 << 20)]
_Vocabulary = Annotated[int, Field(ge=1, le=1 << 28)]
_Positions = Annotated[int, Field(ge=1, le=1 << 30)]


def _check_even(head_dim: int | None) -> int | None:
    if head_dim is not None and head_dim % 2:
        raise ValueError(f"expected an even number for rotary positions, not {head_dim}")
    return head_dim


class _Values(BaseModel):
    """Values of a JSON object: keys that are not read may be there, and no value is converted."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


_Kind = TypeVar("_Kind", bound=_Values)
_LayerNumbers = list[Annotated[int, Field(ge=0)]]


class RopeConfig(_Values):
    """Rotary position embedding (RoPE) without scaling."""

    rope_theta: float = Field(1e4, gt=0)


class Llama3RopeConfig(RopeConfig):
    """Llama 3's scaled RoPE: long wavelengths are stretched by `factor`."""

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: _Positions

    @model_validator(mode="after")
    def _check_bands(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"expected high_freq_factor {self.high_freq_factor:g} above low_freq_factor "
                f"{self.low_freq_factor:g}"
            )
        return self


class SizesConfig(_Values):
    """Sizes of a decoder."""

    num_hidden_layers: _Layers
    hidden_size: _Width
    num_attention_heads: _Heads
    num_key_value_heads: _Heads | None = None  # None: as many as there are heads
    head_dim: Annotated[_Heads | None, AfterValidator(_check_even)] = None
    intermediate_size: _Width
    vocab_size: _Vocabulary
    max_position_embeddings: _Positions
    tie_word_embeddings: bool = False
    rms_norm_eps: float = Field(1e-6, ge=0, le=1)
    initializer_range: float = Field(0.02, ge=0)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not an even multiple of num_attention_heads "
                f"{heads}; correct them, or give head_dim"
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads {self.kv_heads} does not divide num_attention_heads {heads}"
            )
        return self

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class ExpertsConfig(_Values):
    """Sizes of a mixture of experts."""

    # transformers 5 writes the count under the name that all its mixtures share.
    num_experts: _Experts = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: _Experts
    moe_intermediate_size: _Width
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: _LayerNumbers = []

    @model_validator(mode="after")
    def _check_experts_of_a_token(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the "
                f"{self.num_experts} experts of a layer"
            )
        return self


class ServedConfig(_Values):
    """Values that a server of any kind of model needs."""

    model_type: str = ""
    vocab_size: _Vocabulary
    max_position_embeddings: int = 0  # 0: not known
    decoder_sparse_step: int = 1
    mlp_only_layers: _LayerNumbers = []


class EncoderConfig(_Values):
    """Values that an index needs of its encoder."""

    hidden_size: _Width


def read_values(kind: type[_Kind], config: Mapping[str, Any], where: str) -> _Kind:
    """Return the values of one kind in the content of a config.json; a null counts as absent.

    Args:
        where: file or section of the config, for errors.

    Raises:
        ModelError: a key is missing, or values have another type, are out of bounds or contradict
            each other. The message names the first missing key, or else the keys with wrong values.
    """
    values = {key: value for key, value in config.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        missing = [line["loc"][-1] for line in error.errors() if line["type"] == "missing"]
        problem = f"there is no key '{missing[0]}'" if missing else error_line(error, kind, values)
        raise ModelError(f"{where}: {problem}; expected a Hugging Face config.json") from None
