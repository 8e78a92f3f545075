"""How tests start SGLang's own server, or reach one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.settings import SGLangSettings
from tests.support.tiny import MAX_LENGTH

IN_FLOAT32 = {  # kernels of its own compute in half precision only
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "max-total-tokens": 16384,
    "random-seed": 1,
    "sleep-on-idle": True,  # else it looks for requests without a pause, on a core of its own
}
ON_A_CPU = {"device": "cpu", "disable-overlap-schedule": True}


def server_settings(tp: int = 1) -> dict[str, Any]:
    """`options` and `environment` of servers on this machine, as an engine's config has them."""
    if torch.cuda.is_available():
        return {"options": IN_FLOAT32, "environment": {}}
    environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    if tp > 1:  # else each rank wants a NUMA node of its own
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp)
        )
    return {"options": IN_FLOAT32 | ON_A_CPU, "environment": environment}


async def pid_of(replica: Replica) -> int | None:
    """A server's process, None where it is not ours."""
    if replica.host is None:
        return None
    pid: int | None = (
        replica.host.pid() if replica.actors is None else await replica.host.pid.remote()
    )
    return pid


def make_engine(given: str, model: Path, folder: Path, **settings: Any) -> SGLangEngine:
    """Return an engine on `model`, with servers of the interpreter `given`, or one at the URL `given`.

    Weights and logs are kept below `folder`.
    """
    where: dict[str, Any] = {"urls": [given]} if "://" in given else {"python": given}
    return SGLangEngine(
        SGLangSettings(
            folder=model,
            max_length=MAX_LENGTH,
            rows=48,
            weights_folder=folder / "weights",
            log=folder / "server.log",
            start_s=1500.0,
            **server_settings(int(settings.get("tp", 1))),
            **where,
            **settings,
        )
    )
