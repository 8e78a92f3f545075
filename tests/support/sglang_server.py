"""Engines on real SGLang servers, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.settings import SGLangSettings
from tests.support.tiny import MAX_LENGTH

# SGLang's own attention and sampling kernels compute in half precision only.
IN_FLOAT32 = {
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "max-total-tokens": 16384,
    "random-seed": 1,
    "sleep-on-idle": True,  # otherwise an idle server polls, and occupies a core
}
ON_A_CPU = {"device": "cpu", "disable-overlap-schedule": True}


def server_settings(tp: int = 1) -> dict[str, Any]:
    """Return the `options` and `environment` of an engine's config for servers on this machine."""
    if torch.cuda.is_available():
        return {"options": IN_FLOAT32, "environment": {}}
    environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    if tp > 1:  # by default SGLang binds each rank to another NUMA node
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp)
        )
    return {"options": IN_FLOAT32 | ON_A_CPU, "environment": environment}


async def pid_of(replica: Replica) -> int | None:
    """Return the process id of a server; None if this process did not start it."""
    if replica.host is None:
        return None
    if replica.make_actors is None:
        return replica.host.pid()
    return await replica.host.pid.remote()


def make_engine(server: str, model: Path, folder: Path, **settings: Any) -> SGLangEngine:
    """Return an engine on `model`; weights and logs are written below `folder`.

    Args:
        server: URL of a server, or a Python interpreter that starts servers.
    """
    source: dict[str, Any] = {"urls": [server]} if "://" in server else {"python": server}
    return SGLangEngine(
        SGLangSettings(
            folder=model,
            max_length=MAX_LENGTH,
            rows=48,
            weights_folder=folder / "weights",
            log=folder / "server.log",
            start_s=1500.0,
            **server_settings(int(settings.get("tp", 1))),
            **source,
            **settings,
        )
    )
