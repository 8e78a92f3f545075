"""Bandwidth of sending weights to another process on the same GPU, of sleep and wake, and of checkpoints.

The other process stands for SGLang and runs `python -m benchmarks.gpu.hand_over`. It prints its URL,
opens the tensors of the transport `tensor` as SGLang does, copies them into its own, and returns their
checksums.
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
from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer, synchronize, time_call
from benchmarks.gpu.shapes import write_model
from rollout.models.tensors import checksum

# Modules whose objects a pickled bucket of tensors may contain.
_ALLOWED_MODULES = {"torch", "torch.multiprocessing.reductions", "torch.storage", "types"}
Shapes = Mapping[str, tuple[int, ...]]


def hand_over(tiny: bool) -> None:
    """Measure weight updates of a server, whose weights are then compared; sleep and wake; and a checkpoint."""
    for measure in (_measure_hand_over, _measure_sleep_and_checkpoint):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), tiny)


def _measure_hand_over(folder: Path, tiny: bool) -> None:
    from rollout.models.architecture import read_architecture
    from rollout.models.fused_weights import DecoderWeights
    from rollout.models.named_buffers import META_STORAGE
    from rollout.sync.cuda_ipc import TensorSender
    from rollout.sync.transport import SyncRoute

    if not torch.cuda.is_available():
        torch.multiprocessing.set_sharing_strategy("file_system")
    architecture = read_architecture(write_model("tiny" if tiny else "4b", folder))
    buffers = DecoderWeights(architecture, META_STORAGE).buffers
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    write_headers(folder, shapes)
    with receiver() as url:
        sender = TensorSender(SyncRoute(transport="tensor", target=url, model=str(folder)))
        if tiny:
            sender.bucket_bytes = 1 << 16
        for version in (1, 2):  # in the first version the receiver allocates its tensors
            weights = _draw_weights(shapes, version)
            synchronize()
            update = sender.send(weights.items(), version)
            checksums = httpx.post(f"{url}/sums", timeout=600, trust_env=False).json()
            wrong = [
                name
                for name, tensor in weights.items()
                if checksums.pop(name, None) != checksum(tensor)
            ]
            say(
                what="hand-over, GB/s",
                version=version,
                gb=round(update.bytes / 1e9, 3),
                value=round(update.bytes / update.seconds / 1e9, 3),
                wrong=wrong[:3],
                ok=not wrong and not checksums,
            )


def _draw_weights(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device())
        for name, shape in shapes.items()
    }


def write_headers(folder: Path, shapes: Shapes) -> None:
    """Write a sparse safetensors file of bfloat16 tensors, of which only the header takes space on the disk."""
    end = 0
    header = {}
    for name, shape in shapes.items():
        begin = end
        end = begin + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _measure_sleep_and_checkpoint(folder: Path, tiny: bool) -> None:
    model, layout = ("tiny", "small") if tiny else ("0.5b", "groups")
    trainer, batches = start_trainer(folder, model, layout, bf16=not tiny)
    trainer.update(batches)  # allocates Adam's moments
    sleep_bytes = trainer.sleep()  # the first sleep allocates page-locked memory
    trainer.wake()
    _say_rate("sleep", sleep_bytes, time_call(trainer.sleep))
    _say_rate("wake", sleep_bytes, time_call(trainer.wake))

    copy_s = 0.0
    write_s = 0.0
    for number in (1, 2):  # the first save allocates memory
        copy_s = time_call(partial(trainer.save, folder / str(number)))
        write_s = time_call(trainer.wait_written)
    size = sum(file.stat().st_size for file in (folder / "2").iterdir())
    _say_rate("checkpoint", size, copy_s + write_s, copied=round(size / copy_s / 1e9, 3))
    del trainer
    stop_trainer()


def _say_rate(operation: str, size: int, seconds: float, **figures: float) -> None:
    rate = round(size / seconds / 1e9, 3)
    say(what=f"{operation}, GB/s", gb=round(size / 1e9, 3), value=rate, **figures)


@contextmanager
def receiver() -> Iterator[str]:
    """Start a receiver, yield its URL, and kill it at the end of the block."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.hand_over"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


class Unpickler(pickle.Unpickler):
    """Unpickler of tensors of another process, which refuses all other objects.

    The sender names the GPU by its UUID instead of its number.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in _ALLOWED_MODULES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")
        value = super().find_class(module, name)
        return _rebuild_by_uuid if value is reductions.rebuild_cuda_tensor else value


def _rebuild_by_uuid(*arguments: Any) -> Tensor:
    """Call torch's `rebuild_cuda_tensor` with the number of the GPU in place of its UUID."""
    uuids = [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    rebuild: Any = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


class Receiver(BaseHTTPRequestHandler):
    """Handler of the requests that SGLang gets during a weight update, and of /sums.

    Attributes:
        tensors: the received tensors by name, of the whole process.
    """

    protocol_version = "HTTP/1.1"
    tensors: dict[str, Tensor] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") or {}
        answer: dict[str, Any] = {"success": True}
        if self.path == "/update_weights_from_tensor":
            self._load(base64.b64decode(body["serialized_named_tensors"][0]))
        elif self.path == "/end_weight_update":
            synchronize()  # like SGLang, a bucket is answered when its copies are queued
        elif self.path == "/sums":
            answer = {name: checksum(tensor) for name, tensor in self.tensors.items()}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _load(self, payload: bytes) -> None:
        bucket = Unpickler(io.BytesIO(payload)).load()
        flat = bucket["flattened_tensor"]
        for entry in bucket["metadata"]:
            source = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
            target = self.tensors.setdefault(entry.name, torch.empty_like(source))
            target.copy_(source)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
