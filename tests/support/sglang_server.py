"""How tests start SGLang's own server, or reach one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollout.engines.sglang.engine import SGLangEngine
from tests.support.tiny import MAX_LENGTH, make_model

ON_A_CPU = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "max-total-tokens": 16384,
}


def make_engine(given: str, folder: Path) -> SGLangEngine:
    """An engine on the tiny model, with a server that the interpreter `given` starts, or on one at the URL `given`."""
    make_model(0).save_pretrained(folder / "model")
    gpu = torch.cuda.is_available()
    where: dict[str, Any] = {"urls": [given]} if "://" in given else {"python": given}
    return SGLangEngine(
        folder / "model",
        max_length=MAX_LENGTH,
        rows=48,
        restarts=1,
        weights_folder=folder / "weights",
        options={"dtype": "float32", "random-seed": 1, **({} if gpu else ON_A_CPU)},
        environment={} if gpu else {"SGLANG_USE_CPU_ENGINE": "1"},
        log=folder / "server.log",
        start_s=1500.0,
        **where,
    )
