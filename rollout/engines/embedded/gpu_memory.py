"""Memory of an embedded engine on a GPU, by formula; all sizes are bytes."""

from rollout.base.errors import EngineError
from rollout.models.architecture import Architecture

PREFILL_TOKENS = 16_384  # a pass admits prompts until it has this many tokens
_USABLE_SHARE = 0.95  # of the free memory, because the allocator leaves gaps
# Number of tensors as large as the logits of all rows: sampling holds four at a time, and the graphs
# for fewer rows, which keep their logits, together as much as one.
_LOGIT_COPIES = 5


def token_bytes(architecture: Architecture, *, bf16: bool) -> int:
    """Return the bytes of the keys and values of one token."""
    elements = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim
    return elements * (2 if bf16 else 4)


def pass_bytes(
    architecture: Architecture, length: int, *, bf16: bool, adapters: bool = False
) -> int:
    """Return the memory of a pass over prompts or of a pass that scores replies, whichever is larger.

    A pass holds the residual stream in float32. In the type of the matrices it holds either the MLP's
    input, output, gate, up projection and the product of these two; or the attention's input, output,
    projections, rotated queries and attended values. Scoring also holds keys and values of one layer.

    Args:
        length: maximum number of tokens of a sequence. The last prompt of a pass may have as many.
        bf16: True if matrices are multiplied in bfloat16, otherwise in float32.
        adapters: True if the decoder has adapters. In bfloat16, their input and output then take
            memory too, in float32.
    """
    experts = architecture.experts
    ffn = architecture.ffn if experts is None else max(architecture.ffn, experts.ffn)
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim
    widest = 2 * architecture.hidden + max(3 * ffn, 3 * queries + 2 * keys)
    element_bytes = 2 if bf16 else 4
    per_token = 4 * architecture.hidden + element_bytes * widest
    if adapters and bf16:
        per_token += 4 * (architecture.hidden + max(2 * ffn, queries + 2 * keys))

    prefill = (PREFILL_TOKENS + length) * per_token
    scoring = max(PREFILL_TOKENS, length) * (per_token + element_bytes * 2 * keys)
    return max(prefill, scoring)


def logits_bytes(architecture: Architecture, rows: int) -> int:
    """Return the memory of the logits in decoding steps of up to `rows` rows, and of sampling from them.

    CUDA graphs keep this memory.
    """
    return _LOGIT_COPIES * 4 * rows * architecture.vocab


def rows_that_fit(
    architecture: Architecture,
    rows: int,
    length: int,
    free_bytes: int,
    *,
    bf16: bool,
    adapters: bool = False,
) -> int:
    """Return how many of `rows` sequences of at most `length` tokens fit into the free memory.

    Args:
        adapters: see `pass_bytes`.

    Raises:
        EngineError: not even one fits.
    """
    row_bytes = token_bytes(architecture, bf16=bf16) * length
    one_pass = pass_bytes(architecture, length, bf16=bf16, adapters=adapters)
    row_with_logits = row_bytes + logits_bytes(architecture, 1)
    fitting = int((_USABLE_SHARE * free_bytes - one_pass) // row_with_logits)
    if fitting < 1:
        raise EngineError(
            f"the GPU has {free_bytes / 1e9:.1f} GB free; keys and values of one sequence of {length} "
            f"tokens take {row_bytes / 1e9:.1f} GB, and a pass {one_pass / 1e9:.1f} GB; lower "
            "engine.max_length, or use a larger GPU"
        )
    return min(rows, fitting)
