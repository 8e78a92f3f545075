"""Weights to another process on the same GPU as to SGLang, which the process stands for; sleep, wake and checkpoints.

`python -m benchmarks.gpu.hand_over` is that process: it prints its URL, opens what the transport `tensor` sends it as
SGLang does, and copies the tensors into its own, whose checksums it says.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.machine import device, once, say, settle, start_trainer, stop_trainer
from benchmarks.gpu.shapes import write_model
from rollout.models.tensors import checksum

# of what a tensor and its place in a bucket are made
_OPENED = {"torch", "torch.multiprocessing.reductions", "torch.storage", "types"}
Shapes = Mapping[str, tuple[int, ...]]


def hand_over(tiny: bool) -> None:
    """Seconds of an update of a server, whose weights are then compared; of a sleep; of a checkpoint."""
    for work in (_sent, _slept_and_saved):
        with tempfile.TemporaryDirectory() as folder:
            work(Path(folder), tiny)


def _sent(folder: Path, tiny: bool) -> None:
    from rollout.models.architecture import read_architecture
    from rollout.models.fused_weights import NOWHERE, Weights
    from rollout.sync.cuda_ipc import TensorSender
    from rollout.sync.transport import SyncRoute

    if not torch.cuda.is_available():
        torch.multiprocessing.set_sharing_strategy("file_system")
    architecture = read_architecture(write_model("tiny" if tiny else "4b", folder))
    shapes = {
        name: tuple(shape) for name, (shape, _) in Weights(architecture, NOWHERE).places.items()
    }
    write_headers(folder, shapes)
    with receiver() as url:
        sender = TensorSender(SyncRoute(transport="tensor", target=url, model=str(folder)))
        if tiny:
            sender.bucket_bytes = 1 << 16
        for version in (1, 2):  # the first time the receiver has no tensors yet
            weights = _drawn(shapes, version)
            settle()
            update = sender.send(weights.items(), version)
            got = httpx.post(f"{url}/sums", timeout=600, trust_env=False).json()
            wrong = [
                name for name, tensor in weights.items() if got.pop(name, None) != checksum(tensor)
            ]
            ok = not wrong and not got
            rate = round(update.bytes / update.seconds / 1e9, 3)
            say(
                what="hand-over, GB/s",
                version=version,
                gb=round(update.bytes / 1e9, 3),
                value=rate,
                wrong=wrong[:3],
                ok=ok,
            )


def _drawn(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device())
        for name, shape in shapes.items()
    }


def write_headers(folder: Path, shapes: Shapes) -> None:
    """A safetensors file of these bfloat16 tensors that takes no room: nothing of it but the header is written."""
    end, header = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _slept_and_saved(folder: Path, tiny: bool) -> None:
    trainer, batches = start_trainer(
        folder, *(("tiny", "small") if tiny else ("0.5b", "groups")), bf16=not tiny
    )
    trainer.update(batches)  # now Adam has moments
    slept = trainer.sleep()  # page-locked memory is taken once
    trainer.wake()
    say(
        what="sleep, GB/s",
        gb=round(slept / 1e9, 3),
        value=round(slept / once(trainer.sleep) / 1e9, 3),
    )
    say(
        what="wake, GB/s",
        gb=round(slept / 1e9, 3),
        value=round(slept / once(trainer.wake) / 1e9, 3),
    )
    for number in (1, 2):
        copied = once(partial(trainer.save, folder / str(number)))
        wrote = once(trainer.written)
    size = sum(file.stat().st_size for file in (folder / "2").iterdir())
    rates = {
        "value": round(size / (copied + wrote) / 1e9, 3),
        "copied": round(size / copied / 1e9, 3),
    }
    say(what="checkpoint, GB/s", gb=round(size / 1e9, 3), **rates)
    del trainer
    stop_trainer()


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of a receiver, while it runs."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.hand_over"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


class Unpickler(pickle.Unpickler):
    """Opens tensors of another process, which names their GPU by its UUID where torch has its number; nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in _OPENED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")
        found = super().find_class(module, name)
        return _opened if found is reductions.rebuild_cuda_tensor else found


def _opened(*arguments: Any) -> Tensor:
    uuids = [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    rebuild: Any = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


class Receiver(BaseHTTPRequestHandler):
    """Answers what SGLang is asked in an update, and /sums."""

    protocol_version = "HTTP/1.1"
    held: dict[str, Tensor] = {}  # noqa: RUF012  (what the process has)

    def do_POST(self) -> None:
        body = (
            json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}") or {}
        )
        said: dict[str, Any] = {"success": True}
        if self.path == "/update_weights_from_tensor":
            self._load(base64.b64decode(body["serialized_named_tensors"][0]))
        elif self.path == "/end_weight_update":
            settle()  # SGLang answers a bucket when its copies are queued
        elif self.path == "/sums":
            said = {name: checksum(tensor) for name, tensor in self.held.items()}
        text = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _load(self, payload: bytes) -> None:
        bucket = Unpickler(io.BytesIO(payload)).load()
        flat = bucket["flattened_tensor"]
        for entry in bucket["metadata"]:
            tensor = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
            self.held.setdefault(entry.name, torch.empty_like(tensor)).copy_(tensor)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
