"""Memory of an SGLang server on a GPU beside weights and KV cache, by formula; all sizes are bytes.

The numbers are those of SGLang 0.5.23.
"""

from collections.abc import Mapping
from typing import Any

from rollout.engines.sglang.arguments import with_dashes
from rollout.models.architecture import Architecture

# (memory in GB, default number of tokens in a pass over prompts on a GPU that has less memory), from
# `_handle_gpu_memory_settings`.
_PREFILL_TOKENS = ((20, 2048), (60, 4096), (160, 8192))
_MAX_PREFILL_TOKENS = 16384
_CHUNK_ARGUMENT = "chunked-prefill-size"
# Rows of logits, one for each token, that are computed at a time (SGLANG_LOGPROB_CHUNK_SIZE).
_SCORED_TOKENS = 2048


def prefill_tokens(options: Mapping[str, Any], gpu_gb: float) -> int:
    """Return the maximum number of tokens in one pass over prompts.

    If the options state no positive number, this is SGLang's default for the GPU.

    Args:
        options: arguments of the server.
        gpu_gb: memory of the GPU in GB.
    """
    stated = with_dashes(options).get(_CHUNK_ARGUMENT)
    if isinstance(stated, int) and stated > 0:
        return stated
    for memory_gb, tokens in _PREFILL_TOKENS:
        if gpu_gb < memory_gb:
            return tokens
    return _MAX_PREFILL_TOKENS


def prefill_bytes(architecture: Architecture, tp: int, tokens: int) -> float:
    """Return the bytes of the activations of a pass over prompts, which the CUDA graphs of prompts keep.

    For each token in bfloat16, these are three vectors of the hidden size (residual stream, its norm
    and the output of a part of a layer), and the widest part of a layer. In the MLP this is gate, up
    projection and their product, and in the attention the q, k and v projections, the rotated
    queries and the attended values. In a mixture, each chosen expert has the three vectors of an MLP,
    and an output of the hidden size.
    """
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim
    widest = max(3 * architecture.ffn, 3 * queries + 2 * keys) / tp
    experts = architecture.experts
    if experts is not None:
        chosen = experts.per_token * (3 * experts.ffn / tp + architecture.hidden)
        widest = max(widest, chosen)
    return 2 * tokens * (3 * architecture.hidden + widest)


def scoring_bytes(architecture: Architecture, tp: int) -> float:
    """Return the bytes of the float32 logits, and of their copies, while given tokens are scored."""
    # As SGLang counts in `_can_borrow_logprob_memory` of layers/logprob_processor.py: scoring holds the
    # logits and the log-probabilities. With several ranks, the gathering of the logits may hold three
    # matrices: the part of a rank, the gathered parts, and their copy in one piece.
    matrices = 3 if tp > 1 else 2
    return 4.0 * matrices * _SCORED_TOKENS * architecture.vocab


def adapter_bytes(parameters: float, adapters: int) -> float:
    """Return the bytes of a server's slots for adapters in bfloat16.

    Each adapter has two slots, for its present version and the one before, and requests without an
    adapter have one. All slots are as large as the largest adapter.

    Args:
        parameters: elements of the largest adapter, on one GPU.
        adapters: number of adapters.
    """
    return 2 * parameters * (2 * adapters + 1)
