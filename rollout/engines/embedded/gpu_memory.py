"""Memory of an embedded engine on a GPU, by formula; all sizes are bytes."""

from rollout.base.errors import EngineError
from rollout.models.architecture import Architecture

PREFILL_TOKENS = 16_384  # a pass admits prompts until it has this many tokens
_USABLE_SHARE = 0.95  # of the free memory, because the allocator leaves gaps
_LOGIT_COPIES = 4  # tensors as large as the logits that sampling holds at a time


def token_bytes(architecture: Architecture, *, bf16: bool) -> int:
    """Return the bytes of the keys and values of one token."""
    elements = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim
    return elements * (2 if bf16 else 4)


def working_bytes(architecture: Architecture, rows: int, length: int, *, bf16: bool) -> int:
    """Return the memory of a pass: activations of one layer in prefill, or logits with their copies.

    A prefill holds the residual stream in float32. In the type of the matrices it holds the input and
    the output of the MLP with gate, up projection and their product, or the input and the output of
    attention with projections, queries and attended values.

    Args:
        rows: number of rows that are decoded.
        length: maximum number of tokens of a sequence. The last prompt of a pass may have as many.
    """
    experts = architecture.experts
    ffn = architecture.ffn if experts is None else max(architecture.ffn, experts.ffn)
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim
    widest = 2 * architecture.hidden + max(3 * ffn, 3 * queries + 2 * keys)
    element_bytes = 2 if bf16 else 4
    prefill = (PREFILL_TOKENS + length) * (4 * architecture.hidden + element_bytes * widest)
    logits = _LOGIT_COPIES * 4 * rows * architecture.vocab
    return max(prefill, logits)


def rows_that_fit(
    architecture: Architecture, rows: int, length: int, free_bytes: int, *, bf16: bool
) -> int:
    """Return how many of `rows` sequences of at most `length` tokens fit into the free memory.

    Raises:
        EngineError: not even one fits.
    """
    row_bytes = token_bytes(architecture, bf16=bf16) * length
    working = working_bytes(architecture, rows, length, bf16=bf16)
    fitting = int((_USABLE_SHARE * free_bytes - working) // row_bytes)
    if fitting < 1:
        raise EngineError(
            f"the GPU has {free_bytes / 1e9:.1f} GB free; keys and values of one sequence of {length} "
            f"tokens take {row_bytes / 1e9:.1f} GB, and a pass {working / 1e9:.1f} GB; lower "
            "engine.max_length or engine.slots, or use a larger GPU"
        )
    return min(rows, fitting)
