"""Retrieval server as a child process of a run."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from retrieval.corpus import RetrievalError

logger = logging.getLogger(__name__)

START_S = 120.0  # deadline of the start of a server with an empty index
READ_BYTES_PER_S = 1e8  # lowest assumed speed of reading and verifying an index
STOP_S = 5.0  # time between SIGTERM and SIGKILL
REPORT_GAP_S = 60.0  # two calls of `revive` with a longer gap belong to different outages


class RetrieverSidecar:
    """A retrieval server on a free loopback port, which runs for the length of a `with` block.

    `with RetrieverSidecar(index_dir) as url:` starts it. The kernel also kills the server when the
    thread that started it ends, so enter the block and call `revive` on a thread that outlives the
    block.

    Attributes:
        url: base URL of the server, None before it is ready.
        pid: process id of the server, None while there is none.
    """

    def __init__(
        self,
        index_dir: Path | str,
        *,
        log_path: Path | str | None = None,
        python: Path | None = None,
        encoder_folder: Path | str | None = None,
        timeout_s: float | None = None,
        gpus: Sequence[str] = (),
        extra_args: tuple[str, ...] = (),
        may_restart: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the command line; `__enter__` starts the server.

        Args:
            index_dir: folder of the index.
            log_path: file for the output of the server; None: a temporary file.
            python: interpreter of the server; None: the one of this process.
            encoder_folder: folder of the encoder; None: the packaged MiniLM.
            timeout_s: deadline of the start; None: two minutes, and one more for every 6 GB of the
                index.
            gpus: ids of the GPUs that the server may use; empty: all.
            extra_args: further options of the server.
            may_restart: called before a restart; the server is restarted only if it returns True.

        Raises:
            RetrievalError: there is no such interpreter.
        """
        self.index_dir = Path(index_dir).resolve()
        self.url: str | None = None
        self.pid: int | None = None
        self._log_path = Path(log_path).resolve() if log_path else None
        if python is not None and not python.is_file():
            raise RetrievalError(
                f"retriever.python: no interpreter at {python}; "
                "create one from retrieval/environment.yml"
            )
        interpreter = str(python.absolute()) if python else sys.executable
        self._command = [interpreter, "-m", "retrieval.server", "--index", str(self.index_dir)]
        self._command += extra_args
        if encoder_folder:
            self._command += ["--encoder-folder", str(Path(encoder_folder).resolve())]
        if gpus:
            self._command = ["env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}", *self._command]
        if timeout_s is None:
            index_bytes = sum(path.stat().st_size for path in self.index_dir.glob("*"))
            timeout_s = START_S + index_bytes / READ_BYTES_PER_S
        self._timeout_s = timeout_s
        self._may_restart = may_restart
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # Times of the first and the latest call of `revive` in an outage, on the clock time.monotonic().
        self._outage_began = 0.0
        self._last_report = 0.0

    @property
    def command(self) -> list[str]:
        """Command line of the server, without the port and the ready file of one start."""
        return list(self._command)

    def __enter__(self) -> str:
        """Start the server and return its URL.

        Raises:
            RetrievalError: the server cannot start; the message has the last line of its output.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="retriever-")
        self._ready_file = Path(self._folder.name, "ready.json")
        self._log = self._log_path or Path(self._folder.name, "server.log")
        self._log.unlink(missing_ok=True)
        try:
            self._process = self._start(port=0)
            self.url = self._wait_until_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self.url

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _stop(self._process)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = None
        self._folder = None
        self.url = None
        self.pid = None

    def revive(self) -> None:
        """Restart a server that died, at the same port, if `may_restart` agrees; do not wait.

        Clients call this repeatedly while the server does not answer. A server that still runs, but
        has not answered for as long as a start may take, is killed first.
        """
        if self.url is None or self._process is None:
            return
        now = time.monotonic()
        if now - self._last_report > REPORT_GAP_S:
            self._outage_began = now
        self._last_report = now

        running = self._process.poll() is None
        if running and now - self._outage_began < self._timeout_s:
            return
        if not self._may_restart():
            return
        if running:
            self._process.kill()
            self._process.wait()
            reason = "does not answer"
        else:
            reason = f"ended with code {self._process.returncode}"
        logger.warning("retrieval server for %s %s; it is started again", self.index_dir, reason)
        self._outage_began = now
        self._process = self._start(port=int(self.url.rpartition(":")[2]))

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        command = [*self._command, "--port", str(port), "--ready-file", str(self._ready_file)]
        command += ["--die-with-parent", str(os.getpid())]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # A new session, so that Ctrl-C reaches the run and not the server.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).absolute().parents[1],  # where `-m retrieval.server` is found
                start_new_session=True,
            )
        self.pid = process.pid
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> str:
        """Return the URL of the server once it answers."""
        deadline = time.monotonic() + self._timeout_s
        while not self._ready_file.exists():
            code = process.poll()
            if code is not None:
                raise self._start_error(f"ended with code {code}")
            if time.monotonic() > deadline:
                raise self._start_error(f"was not ready after {self._timeout_s:g} s")
            time.sleep(0.02)
        return str(json.loads(self._ready_file.read_bytes())["url"])

    def _start_error(self, reason: str) -> RetrievalError:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else "nothing"
        log = f" (log: {self._log_path})" if self._log_path else ""
        return RetrievalError(
            f"retrieval server for {self.index_dir} {reason}; its last output was: {last_line}{log}"
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
