"""Process groups: one policy's ranks as Megatron's tensor-parallel group."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def free_port() -> int:
    """A port on loopback that the system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*, rank: int, tp: int, address: str, port: int, threads: int) -> None:
    """Join the policy's process group of `tp` ranks, NCCL where there is CUDA and gloo elsewhere."""
    torch.set_num_threads(threads)
    # torch.distributed's env:// rendezvous and Megatron itself read these four and nothing else from us
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(tp))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


def stop() -> None:
    """Leave the process group."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
