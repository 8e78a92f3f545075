"""The retrieval server as a child process that cannot outlive its parent."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from retrieval.corpus import RetrievalError

GRACE_S = 5.0  # between SIGTERM and SIGKILL


class RetrieverSidecar:
    """`with RetrieverSidecar(index_dir) as url:` runs a server on a free loopback port for as long as the block.

    The child has its own process group, which is killed on the way out, and it dies with the thread that started it:
    enter and leave on a thread that lives as long as the block.
    """

    def __init__(
        self,
        index_dir: Path | str,
        *,
        log_path: Path | str | None = None,
        threads: int = 1,
        encoder_folder: Path | str | None = None,
        timeout_s: float = 120.0,
        extra_args: tuple[str, ...] = (),
    ) -> None:
        """`log_path` gets the server's output (default: a temporary file); `timeout_s` bounds the start."""
        self.index_dir = Path(index_dir).resolve()
        self.url: str | None = None  # set while the server runs
        self.pid: int | None = None
        self._log_path = Path(log_path).resolve() if log_path else None
        self._options = ["--threads", str(threads), *extra_args]
        if encoder_folder:
            self._options += ["--encoder-folder", str(Path(encoder_folder).resolve())]
        self._timeout_s = timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        """Starts the server, returns its URL; raises RetrievalError with the server's last line if it cannot start."""
        self._folder = tempfile.TemporaryDirectory(prefix="retriever-")
        ready_file = Path(self._folder.name) / "ready.json"
        log_path = self._log_path or Path(self._folder.name) / "server.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "retrieval.server", "--index", str(self.index_dir), "--port", "0"]
        command += ["--ready-file", str(ready_file), "--die-with-parent", str(os.getpid()), *self._options]
        try:
            with log_path.open("wb") as log:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=Path(__file__).resolve().parents[1],  # where `-m retrieval.server` is found, installed or not
                    start_new_session=True,
                )
            self.pid = self._child.pid
            self.url = self._wait(ready_file, log_path)
        except BaseException:
            self._stop()
            raise
        return self.url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait(self, ready_file: Path, log_path: Path) -> str:
        assert self._child is not None
        deadline = time.monotonic() + self._timeout_s
        while not ready_file.exists():
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                happened = f"ended with code {code}" if code is not None else f"not ready after {self._timeout_s:g} s"
                lines = log_path.read_text(errors="replace").strip().splitlines()
                last = lines[-1] if lines else "nothing"
                kept = f" (log: {log_path})" if self._log_path else ""
                raise RetrievalError(f"retrieval server for {self.index_dir} {happened}; it last said: {last}{kept}")
            time.sleep(0.02)
        return str(json.loads(ready_file.read_bytes())["url"])

    def _stop(self) -> None:
        if self._child is not None:
            _signal_group(self._child.pid, signal.SIGTERM)
            try:
                self._child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _signal_group(self._child.pid, signal.SIGKILL)
                self._child.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._child = self._folder = self.url = self.pid = None


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the whole group may have ended already
        os.killpg(group, number)
