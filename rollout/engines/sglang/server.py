"""Process of one SGLang server, which ends with the process that started it."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray

from rollout.base.errors import EngineError
from rollout.base.network import free_port, interface_of
from rollout.base.processes import start_group, stop_group
from rollout.base.urls import without_proxy
from rollout.engines.sglang.settings import SGLangSettings
from rollout.engines.sglang.toolkit import compiler_environment

# Number of tokens of its context that SGLang leaves empty (`get_worker_info` in managers/tp_worker.py).
_EMPTY_CONTEXT_TOKENS = 6
_LOG_CHARS = 300  # length of the end of the log in an error
# Upper bound of the part of a GPU's free memory that a server takes for weights and KV cache.
_MAX_FREE_FRACTION = 0.95
# Variables that a server must not inherit: those that name modules of this environment, and
# expandable segments under either name. SGLang's memory saver cannot free such segments, and looks
# for them under the second name only.
_DROPPED_VARIABLES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(eq=False)
class Server:
    """Process `python -m sglang.launch_server *arguments` of one replica.

    If Ray runs, servers are Ray actors of this class. Otherwise they are objects in this process.

    Attributes:
        python: interpreter of SGLang's environment.
        arguments: arguments of `sglang.launch_server`.
        log: path of the server's log.
        environment: variables of the server, in addition to those of this process.
        key: API key that the server requires; None: none.
        multi_node: True if the server listens at the address of its node, False at the loopback.
        memory_share: share of the total memory of its GPUs that the server takes; None: as much as
            `arguments` say, or as SGLang chooses.

    Raises:
        EngineError: `python` is not a file.
    """

    python: str
    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str]
    key: str | None = field(default=None, repr=False)
    multi_node: bool = False
    memory_share: float | None = None

    def __post_init__(self) -> None:
        if not Path(self.python).is_file():
            raise EngineError(
                f"engine.python: no interpreter at {self.python}; see requirements/sglang.txt"
            )
        self._log = Path(self.log)
        self._process: subprocess.Popen[bytes] | None = None

    def devices(self) -> list[str]:
        """Return the GPUs that Ray assigned to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, devices: Sequence[str] = ()) -> str:
        """Stop the server if it runs and start it; do not wait until it answers.

        Args:
            devices: GPUs that the server sees; empty: all that this process sees.

        Returns:
            The server's URL.
        """
        self.stop()
        address = "127.0.0.1"
        network: dict[str, str] = {}
        if self.multi_node:
            address = str(ray.util.get_node_ip_address())
            interface = interface_of(address)
            network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        # A server sends requests to itself. They contain its key, so no proxy may get them.
        network |= without_proxy(address)
        port = free_port(address)

        environment = {
            name: value for name, value in os.environ.items() if name not in _DROPPED_VARIABLES
        }
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        environment |= network | dict(self.environment)
        # The path is not resolved: Python finds a virtual environment by the link's own path.
        python = Path(self.python).absolute()
        environment |= compiler_environment(python, environment)
        command = [
            str(python),
            "-m",
            "sglang.launch_server",
            *self.arguments,
            *self._key_arguments(),
            *self.memory_arguments(devices),  # they override an earlier --mem-fraction-static
            "--host",
            address,
            "--port",
            str(port),
        ]
        self._process = start_group(command, log=self._log, env=environment)
        return f"http://{address}:{port}"

    def memory_arguments(self, devices: Sequence[str]) -> list[str]:
        """Return the arguments for `memory_share` on these GPUs.

        SGLang takes a fraction of the memory that is free when it starts, so the share of the total
        memory is converted to such a fraction.

        Returns:
            The arguments; [] if there is no share, or the free memory of the GPUs is not known or 0.
        """
        if self.memory_share is None:
            return []
        command = [
            "nvidia-smi",
            "--query-gpu=memory.total,memory.free",
            "--format=csv,noheader,nounits",
            "-i",
            ",".join(devices),
        ]
        try:
            output = subprocess.check_output(command, text=True)
        except (OSError, subprocess.CalledProcessError):
            return []  # there is no GPU, or only a part of one (MIG)
        free_fractions = []
        for line in output.splitlines():
            total, free = line.split(",")
            free_fractions.append(float(free) / float(total))
        if not free_fractions or min(free_fractions) == 0:
            return []
        fraction = min(_MAX_FREE_FRACTION, self.memory_share / min(free_fractions))
        return ["--mem-fraction-static", f"{fraction:.3f}"]

    def _key_arguments(self) -> list[str]:
        """Write the key to a file that only this user can read; return the arguments that name it.

        On the command line the key would be visible to other users.
        """
        if self.key is None:
            return []
        self._log.parent.mkdir(parents=True, exist_ok=True)
        file = self._log.with_suffix(".key.yaml").absolute()
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            # A JSON string is a YAML string too, whatever characters the key has.
            stream.write(f"api-key: {json.dumps(self.key, ensure_ascii=False)}\n")
        return ["--config", str(file)]

    def end_reason(self) -> str:
        """Return the reason why the server has ended, with the end of its log; "" while it runs."""
        if self._process is not None and self._process.poll() is None:
            return ""
        with suppress(OSError):
            end_of_log = " ".join(self._log.read_text(errors="replace").split())[-_LOG_CHARS:]
            return f"the server ended; {self._log} says last: {end_of_log}"
        return "the server ended"

    def pid(self) -> int | None:
        """Return the server's process id; None if it has not been started."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """Stop the server and all its processes."""
        if self._process is not None:
            stop_group(self._process)  # by SIGTERM first, because it has shared memory to remove
            self._process = None


def server_arguments(settings: SGLangSettings) -> list[str]:
    """Return the arguments of `sglang.launch_server`; `settings.arguments` override the defaults below.

    Among their values, True stands for a switch, None and False for no argument, and a list for
    several words. A mapping is written as JSON.
    """
    arguments: dict[str, object] = {
        "model-path": settings.folder,
        "tp-size": settings.tp,
        "context-length": settings.max_length + _EMPTY_CONTEXT_TOKENS,
        "max-running-requests": settings.rows,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "log-level": "warning",
        # Without it, each event of a reply has all tokens so far.
        "incremental-streaming-output": True,
    }
    words: list[str] = []
    for name, value in (arguments | settings.arguments).items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list | tuple):
            words += [_argument_text(item) for item in value]
        elif value is not True:
            words.append(_argument_text(value))
    return words


def _argument_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
