"""Training at `ray://host:port`: the same command runs on the cluster, and this process follows it from outside."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.client.common import GRPC_OPTIONS

from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import StopSignal
from rollout.base.files import write_text
from rollout.base.processes import start_group

_LOOK_S = 0.5  # between two looks at what the command there has printed
_LINGER_S = 60.0  # that its end can be asked for
_SILENCE_MS = 20_000  # that the cluster may owe Ray's client a sign of life, asked for every 30 s; by default 600_000


class RemoteTraining:
    """An actor with the training command of one run, a process of its own, on any node of the cluster."""

    def __init__(self, config: str, folder: str, log: str) -> None:
        """Start it in `folder`; it appends to `log`, and saves and ends when this actor is gone."""
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "mcore_mas", "train", config, "--address", address]
        self._log = Path(log)
        self._start = self._log.stat().st_size if self._log.exists() else 0
        self._process = start_group(command, log=self._log, death=signal.SIGTERM, cwd=Path(folder))
        threading.Thread(target=self._end, daemon=True).start()

    def printed(self, offset: int) -> tuple[bytes, int | None]:
        """What the command has printed from the byte `offset` on, and its exit status where it has ended."""
        status = self._process.poll()  # before the rest is read
        with self._log.open("rb") as log:
            log.seek(self._start + offset)
            return log.read(), status

    def tell(self, number: int) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def _end(self) -> None:
        self._process.wait()
        time.sleep(_LINGER_S)
        os._exit(0)  # of this actor's process, which has nothing else


def train_at(address: str, config: Path, folder: Path) -> None:
    """Have the Ray behind `address` train the run, or find it training already, and follow it to its end.

    What it prints is printed here, a signal goes there, and a failure there ends this process with its exit status. It
    goes on when this process is gone, as at a second Ctrl-C.

    Args:
        folder: the training's own, which all nodes must see.

    Raises:
        ClusterError, TrainingError: one line.
    """
    sign = "grpc.keepalive_timeout_ms"  # read when a connection is made
    GRPC_OPTIONS[:] = [
        (name, _SILENCE_MS if name == sign else value) for name, value in GRPC_OPTIONS
    ]
    logging.getLogger("ray.util.client").setLevel(
        logging.CRITICAL
    )  # what it says of a lost connection is said below
    seen = folder / "seen_by_all"
    write_text(seen, secrets.token_hex(16))
    try:
        with joined_ray(address, seen):
            named = {
                "name": f"train {folder.resolve()}",
                "lifetime": "detached",
                "get_if_exists": True,
            }
            words = (
                str(config.resolve()),
                str(Path.cwd()),
                str((folder / "ray_client.log").resolve()),
            )
            actor: Any = ray.remote(num_cpus=0)(RemoteTraining).options(**named).remote(*words)
            status = asyncio.run(_follow(actor))
            ray.kill(actor)
    except ray.exceptions.RayActorError as error:
        raise TrainingError(
            f"the node that ran the training is lost; the same command goes on ({error})"
        ) from error
    except ConnectionError as error:
        raise TrainingError(
            f"cluster.address: {address} is gone; the same command finds the training again"
        ) from error
    finally:
        seen.unlink(missing_ok=True)
    if status < 0:
        raise TrainingError(
            f"the training there was ended by {signal.Signals(-status).name}; the same command goes on"
        )
    if status:
        sys.exit(status)


async def _follow(actor: Any) -> int:
    stop, told, offset = StopSignal(), False, 0
    stop.listen()
    while True:
        if stop.requested and not told:
            ray.get(actor.tell.remote(int(signal.Signals[stop.sender])))
            told = True
        printed, status = ray.get(actor.printed.remote(offset))
        offset += len(printed)
        os.write(2, printed)
        if status is not None:
            return int(status)
        await asyncio.sleep(_LOOK_S)
