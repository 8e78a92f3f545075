"""One SGLang server process: started in its own environment on a port of the system's choice, ended with ours."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollout.engines.protocol import EngineError

_PDEATHSIG = 1  # PR_SET_PDEATHSIG, linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_GRACE_S = 5.0
_SPARE = 6  # tokens of its context that SGLang leaves empty (`get_worker_info` in managers/tp_worker.py)
_SHOWN = 300  # characters of the log's end in an error
# What the server must not inherit: modules of this environment; and SGLang's memory saver refuses expandable segments.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTORCH_CUDA_ALLOC_CONF")


class Server:
    """A process that serves one replica; runs in a Ray actor where GPUs are placed, in this process otherwise."""

    def __init__(self, python: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        """Name what `start` will run: `python -m sglang.launch_server *arguments`.

        Raises:
            EngineError: there is no such interpreter.
        """
        if not Path(python).is_file():
            raise EngineError(f"engine.python: no interpreter at {python}; see requirements/sglang.txt")
        # not resolved: a virtual environment is told by the link that was followed
        self._command = [str(Path(python).absolute()), "-m", "sglang.launch_server", *arguments]
        self._log = Path(log)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def devices(self) -> list[str]:
        """The GPUs that Ray gave this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, devices: Sequence[str] = ()) -> str:
        """Start the server, after ending the one before, and return its URL; it may not answer yet.

        It sees the GPUs `devices`, or without any all that this process sees.
        """
        self.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | seen | self._environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return f"http://127.0.0.1:{port}"

    def ended(self) -> str:
        """Why the server is gone, with the end of its log; "" while it runs."""
        if self._process is not None and self._process.poll() is None:
            return ""
        with suppress(OSError):
            last = " ".join(self._log.read_text(errors="replace").split())[-_SHOWN:]
            return f"the server ended; {self._log} says last: {last}"
        return "the server ended"

    def pid(self) -> int | None:
        """The server's process."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """End the server and all its processes."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)  # it has shared memory to remove
            self._process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _die_with_parent() -> None:
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def arguments(folder: str, *, tp: int, max_length: int, slots: int, options: Mapping[str, object]) -> list[str]:
    """Of `sglang.launch_server`; `options` are further ones by name, true for a switch, null for none."""
    fixed: dict[str, object] = {
        "model-path": folder,
        "tp-size": tp,
        "context-length": max_length + _SPARE,
        "max-running-requests": slots,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "log-level": "warning",
    }
    words: list[str] = []
    for name, value in (fixed | dict(options)).items():
        if value is None or value is False:
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words
