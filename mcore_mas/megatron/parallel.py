"""Process groups: one policy's ranks as Megatron's tensor-, pipeline- and data-parallel groups."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from mcore_mas.megatron.spec import ParallelLayout


def init_process_groups(
    layout: ParallelLayout | None = None, *, rank: int, threads: int, store: Store | None = None
) -> None:
    """Join the policy's process groups, of one rank if no `layout` is given; NCCL where there is CUDA, else gloo.

    Neighbouring ranks are of one tensor-parallel group, then of one context-parallel, then of one data-parallel group.
    A group of one needs no `store` to find itself.
    """
    layout = layout or ParallelLayout()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=layout.ranks, store=store or HashStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1)  # drawn from by nothing, asked for by every layer: there is no dropout


def destroy_process_groups() -> None:
    """Leave the process group."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def speaks() -> bool:
    """Whether this rank knows what the head put out and no other of its data-parallel rank is to say it too."""
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return bool(first and parallel_state.is_pipeline_last_stage())


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of `group` (None: all) gave, in rank order, on every rank; numbers, strings, lists and dicts."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [value]
    written = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device())
    sizes = [torch.empty(1, dtype=torch.int64, device=device()) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(written)], device=device()), group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8, device=device()) for _ in range(ranks)]
    dist.all_gather(texts, torch.nn.functional.pad(written, (0, longest - len(written))), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def equal_lengths(spec: ParallelLayout) -> bool:
    """Whether the micro-batches of one pass must have the same number of tokens.

    Interleaved stages send activations and gradients between the same two ranks at once; Megatron's messages about
    their lengths, unlike those with the data, do not keep the two apart.
    """
    return spec.vpp > 1
