"""Memory of an SGLang server on a GPU beside weights and KV cache, by formula; all sizes are bytes.

The numbers are those of SGLang 0.5.23.
"""

from collections.abc import Mapping
from typing import Any

from rollout.engines.sglang.arguments import with_dashes
from rollout.models.architecture import Architecture

# Longest prompt part of a pass, by the memory of the GPU in GB (`_handle_gpu_memory_settings`).
_PREFILL_TOKENS = ((20, 2048), (60, 4096), (160, 8192))
_MOST_PREFILL_TOKENS = 16384
_CHUNK_ARGUMENT = "chunked-prefill-size"
_SCORED_TOKENS = 2048  # rows of logits that are computed at a time (SGLANG_LOGPROB_CHUNK_SIZE)


def prefill_tokens(options: Mapping[str, Any], gpu_gb: float) -> int:
    """Return the most tokens of a pass over prompts.

    Args:
        options: arguments of the server.
        gpu_gb: memory of the GPU.
    """
    stated = with_dashes(options).get(_CHUNK_ARGUMENT)
    if isinstance(stated, int) and stated > 0:
        return stated
    for memory, tokens in _PREFILL_TOKENS:
        if gpu_gb < memory:
            return tokens
    return _MOST_PREFILL_TOKENS


def prefill_bytes(architecture: Architecture, tp: int, tokens: int) -> float:
    """Return the activations of a pass over prompts, which the CUDA graphs of prompts keep.

    They are the residual stream, its norm and an output, and the widest of a layer: gate, up
    projection and their product, or projections, queries and attended values, in bfloat16.
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
    """Return the memory of float32 logits, and of their copies, while given tokens are scored."""
    matrices = 3 if tp > 1 else 2
    return 4.0 * matrices * _SCORED_TOKENS * architecture.vocab


def adapter_bytes(parameters: float, adapters: int) -> float:
    """Return the adapters in a server: the present version of each, the one before, and the bare model.

    Args:
        parameters: elements of the largest adapter, on one GPU.
        adapters: number of adapters.
    """
    return 2 * parameters * (2 * adapters + 1)
