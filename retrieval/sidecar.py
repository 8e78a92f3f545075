"""The server as a child process of a run, and a probe of a server with passages that it should find."""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, RetrievalError
from retrieval.wire import DEFAULT_TOPK, BadRequest, check_query
from rollout.base.processes import Restarts, say, start_group, stop_group

_READ_PER_S = 1e8  # bytes of an index that are read and verified in a second, at least
RESTARTS = 3  # of a server that died or hangs, in an hour
_SAME_S = 60.0  # in which whoever waits for a server asks for it again


class RetrieverSidecar:
    """`with RetrieverSidecar(index_dir) as url:` runs a server on a free loopback port for as long as the block.

    The child has its own process group, which is killed on the way out, and it dies with the thread that started it:
    enter, revive and leave on a thread that lives as long as the block.
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
    ) -> None:
        """`log_path` gets the server's output (default: a temporary file); `timeout_s` bounds the start.

        It is two minutes by default, and one more for every 6 GB of the index's folder, which is read and verified.
        The server runs in `python`'s environment (default: this one) and sees of `gpus`, where named, no others.
        """
        self.index_dir = Path(index_dir).resolve()
        self.url: str | None = None  # set while the server runs
        self.pid: int | None = None
        self._log_path = Path(log_path).resolve() if log_path else None
        if python and not python.is_file():
            raise RetrievalError(
                f"retriever.python: no interpreter at {python}; make one of retrieval/environment.yml"
            )
        self._options = list(extra_args)
        seen = ["env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
        self._python = [*seen, str(python.absolute() if python else sys.executable)]
        if encoder_folder:
            self._options += ["--encoder-folder", str(Path(encoder_folder).resolve())]
        size = sum(path.stat().st_size for path in self.index_dir.glob("*"))
        self._timeout_s = 120.0 + size / _READ_PER_S if timeout_s is None else timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts("retriever", RESTARTS)
        self._missed = self._asked = 0.0  # when it was missed first, and last

    def __enter__(self) -> str:
        """Starts the server, returns its URL; raises RetrievalError with the server's last line if it cannot start."""
        self._folder = tempfile.TemporaryDirectory(prefix="retriever-")
        self._ready = Path(self._folder.name, "ready.json")
        self._log = self._log_path or self._ready.with_name("server.log")
        self._log.unlink(missing_ok=True)
        try:
            self._start(0)
            self.url = self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self.url

    def revive(self) -> None:
        """Start the server again at its port if it has died, and do not wait for it; at most RESTARTS times an hour.

        One that has been asked for as long as a start may take, and has not answered, is ended first.
        """
        if self.url is None or self._child is None:
            return
        now = time.monotonic()
        self._missed, self._asked = self._missed if now - self._asked < _SAME_S else now, now
        running = self._child.poll() is None
        if (running and now - self._missed < self._timeout_s) or not self._restarts.take():
            return
        if running:
            stop_group(self._child, grace_s=0.1)
        happened = "does not answer" if running else f"ended with code {self._child.returncode}"
        say(f"retrieval server for {self.index_dir} {happened}; it is started again")
        self._missed = now
        self._start(int(self.url.rpartition(":")[2]))

    def _start(self, port: int) -> None:
        command = [*self._python, "-m", "retrieval.server", "--index", str(self.index_dir)]
        command += ["--port", str(port), "--ready-file", str(self._ready), *self._options]
        # in the folder where `-m retrieval.server` is found, installed or not
        self._child = start_group(command, log=self._log, cwd=Path(__file__).absolute().parents[1])
        self.pid = self._child.pid

    def _wait(self) -> str:
        assert self._child is not None
        deadline = time.monotonic() + self._timeout_s
        while not self._ready.exists():
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                happened = (
                    f"ended with code {code}"
                    if code is not None
                    else f"not ready after {self._timeout_s:g} s"
                )
                last = (self._log.read_text(errors="replace").strip().splitlines() or ["nothing"])[
                    -1
                ]
                kept = f" (log: {self._log_path})" if self._log_path else ""
                raise RetrievalError(
                    f"retrieval server for {self.index_dir} {happened}; it last said: {last}{kept}"
                )
            time.sleep(0.02)
        return str(json.loads(self._ready.read_bytes())["url"])

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            stop_group(self._child)
        if self._folder is not None:
            self._folder.cleanup()
        self._child = self._folder = self.url = self.pid = None


@dataclass(frozen=True, slots=True)
class Golden:
    """A query and what should be found: passages by id, or any passage with the query as its title."""

    query: str
    ids: frozenset[str] = frozenset()

    def ranks(self, found: Sequence[Passage]) -> list[int | None]:
        """Where each wanted passage is among those found, from 0; None where it is not."""
        if not self.ids:
            titles = [passage.title for passage in found]
            return [titles.index(self.query) if self.query in titles else None]
        places = {passage.id: place for place, passage in enumerate(found)}
        return [places.get(id) for id in self.ids]


def read_golden(path: Path) -> list[Golden]:
    """Golden queries in JSON lines: `{"query": "...", "ids": ["...", ...]}`.

    Raises:
        RetrievalError: a line is none (file:line), or there is none.
    """
    golden = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            golden.append(Golden(check_query(row["query"]), frozenset(map(str, row["ids"]))))
        except (ValueError, LookupError, TypeError, BadRequest) as error:
            raise RetrievalError(
                f'{path}:{number}: expected {{"query": "...", "ids": [...]}} ({error})'
            ) from None
        if not golden[-1].ids:
            raise RetrievalError(
                f"{path}:{number}: no ids; name the passages that the query should find"
            )
    if not golden:
        raise RetrievalError(f"{path}: no golden queries")
    return golden


async def probe(url: str, golden: Sequence[Golden], k: int = DEFAULT_TOPK) -> dict[str, Any]:
    """Ask a server the golden queries, one after the other.

    Returns:
        `n`, `k`, `recall_at_1` and `recall_at_k` (of the wanted passages, the share that is found, as a mean over the
        queries), `latency_ms_median`, `latency_ms_p99`, `latency_ms_max`, `ntotal` and `encoder` (its name).

    Raises:
        RetrievalUnavailable: there is no answer.
        RetrievalError: no queries.
    """
    if not golden:
        raise RetrievalError("probe needs at least one query")
    latency_ms, at_1, at_k = list[float](), list[float](), list[float]()
    async with RetrievalClient(url) as client:
        info = await client.info()
        for one in golden:
            start = time.perf_counter()
            ranks = one.ranks(await client.search(one.query, k))
            latency_ms.append(1000 * (time.perf_counter() - start))
            at_1.append(sum(rank == 0 for rank in ranks) / len(ranks))
            at_k.append(sum(rank is not None for rank in ranks) / len(ranks))
    latency_ms.sort()
    return {
        "n": len(golden),
        "k": k,
        "recall_at_1": statistics.fmean(at_1),
        "recall_at_k": statistics.fmean(at_k),
        "latency_ms_median": round(statistics.median(latency_ms), 3),
        "latency_ms_p99": round(latency_ms[math.ceil(0.99 * len(latency_ms)) - 1], 3),
        "latency_ms_max": round(latency_ms[-1], 3),
        "ntotal": info["ntotal"],
        "encoder": info["encoder"]["name"] if info["encoder"] else "none",
    }
