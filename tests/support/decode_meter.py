"""Metered decoding steps of the embedded engine, on a machine without a GPU.

    python -m tests.support.decode_meter '{"rows": 1}' '{"rows": 256, "bf16": false}' ...

Prints kernels, waits and copies of a step, and estimates of its time: `kernels_ms` is that of the
kernels, which a CUDA graph takes, and `launches_ms` that of launching them one by one. The host's work
between two steps is not in either. torch is patched, so this is a program, which tests run as a process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.gpu_meter import HOST_LAUNCH_S, METER
from tests.support.gpu_patches import OnMeta, prepare_torch


def measure(
    folder: Path, *, rows: int, model: str = "0.5b", prompt: int = 128, bf16: bool = True
) -> dict[str, Any]:
    """Return the figures of one decoding step; `first` has those of the step before, with all prompts.

    Args:
        folder: folder to write the model's configuration to.
        rows: number of requests.
        model: name in `benchmarks.gpu.shapes.MODELS`.
        prompt: tokens of each prompt, which differ from each other.
    """
    from benchmarks.gpu.shapes import write_model
    from rollout.engines.embedded.batching import EmbeddedEngine
    from rollout.engines.embedded.gpu_decoder import make_decoder
    from rollout.models.architecture import read_architecture
    from rollout.records.trajectory import Sampling

    architecture = read_architecture(write_model(model, folder / model))
    with OnMeta(), METER:
        decoder = make_decoder(architecture, prompt + 64, device="cuda", bf16=bf16)
        decoder.adopt(0)
        engine = EmbeddedEngine(decoder, rows=rows)
        for number in range(rows):
            token_ids = [1 + number, *range(prompt - 1)]
            engine.submit(number, token_ids, Sampling(max_tokens=8, seed=number))
        METER.clear()
        engine.step()  # with the first decoding step
        prefill = _figures()
        METER.clear()
        engine.step()
        return {"model": model, "rows": rows, "bf16": bf16, **_figures(), "first": prefill}


def _figures() -> dict[str, Any]:
    launches = sum(METER.launches.values())
    return {
        "launches": launches,
        "kernels_ms": round(1e3 * sum(METER.seconds.values()), 2),
        "launches_ms": round(1e3 * HOST_LAUNCH_S * launches, 2),
        "moved_gb": round(METER.moved_bytes / 1e9, 2),
        "waits": dict(+METER.waits),
        "copies": dict(METER.copies),
        "uploads": sum(METER.inline.values()),
        "mixed": dict(METER.mixed),
    }


def main(cases: list[str]) -> None:
    """Measure each case, a JSON object of arguments of `measure`, and print its figures as JSON."""
    prepare_torch()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(json.dumps(measure(Path(folder), **json.loads(case))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
