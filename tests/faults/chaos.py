"""Chaos: a run that is killed, stopped, starved and lied to at random comes to the bits of one left alone.

It has shared memory of its own (`unshare --mount`), so that what lies there in the end is what a run has left.

`python -m tests.faults.chaos [FAULTS [SEED ...]]`: so many faults in a run, 20 by default, for each seed, 1 2 3 by
default. The run is a real one: `mcore-mas train` with its own Ray, a rank, an engine and a retriever behind a proxy.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import psutil

from retrieval.build import build_index
from retrieval.corpus import write_corpus
from retrieval.encoder import Encoder
from retrieval.sidecar import RetrieverSidecar
from rollout.base.failpoints import FAILPOINTS
from rollout.base.json_files import write_json
from rollout.sandbox.cgroup import PREFIX
from rollout.sync.memory import MEMORY
from tests.faults import proxy
from tests.faults.forked import PASSAGES, bare_folder, fingerprint
from tests.support.run_folder import make_run

ROOT = Path(__file__).resolve().parents[2]
MARK = "MCORE_MAS_CHAOS"  # variable of every process of a run
ALONE = "MCORE_MAS_CHAOS_ALONE"  # variable: this process has shared memory of its own
CLOCK = "MCORE_MAS_CHAOS_CLOCK"  # variable: a file with the seconds that its clock is off, see clock/sitecustomize.py
STEPS = 48
SETTINGS = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "trainer.validate_every=16",
    "data.validation=2",
    "orchestra.options.max_turns=2",
    "env.name=tests.faults.asking:AskingEnv",
    "engine.deterministic=true",
    "engine.restarts=100",
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
)
WAIT_S = 900.0  # for anything to happen


class Run:
    """A training of its own, and what can happen to it."""

    def __init__(self, folder: Path, web: proxy.FaultProxy, temporary: Path) -> None:
        self._folder, self._web, self._temporary = folder, web, temporary
        self.passed, self._orders = temporary.with_name("passed"), temporary.with_name("orders")
        self._clock, self.log = temporary.with_name("clock"), temporary.with_name("chaos.log")
        self.starts = 0
        self._drivers: list[int] = []  # process numbers, one for each start
        self.process: subprocess.Popen[bytes]  # once it has started
        temporary.mkdir()
        self.passed.unlink(missing_ok=True)
        self.order("")
        self.clock(0)

    def order(self, orders: str) -> None:
        """Have failpoints do something, from now on."""
        partial = self._orders.with_suffix(".new")
        partial.write_text(f"*=list:{self.passed};{orders}")
        partial.replace(self._orders)

    def start(self) -> None:
        """Start the training, or go on with it."""
        self.starts += 1
        path = os.pathsep.join((str(ROOT / "tests" / "faults" / "clock"), str(ROOT)))
        own = {
            MARK: str(os.getpid()),
            FAILPOINTS: f"@{self._orders}",
            CLOCK: str(self._clock),
            "PYTHONPATH": path,
        }
        command = [sys.executable, "-m", "mcore_mas", "train", str(self._folder / "config.yaml")]
        with self.log.open("ab") as log:
            env = {**os.environ, **own, "TMPDIR": str(self._temporary)}
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._drivers.append(self.process.pid)

    def progress(self) -> int:
        """Boundaries passed so far, by all of its processes and starts."""
        with suppress(OSError):
            return self.passed.read_bytes().count(b"\n")
        return 0

    def steps(self) -> int:
        """Steps finished so far, those that were taken again counted again."""
        return self.passed.read_bytes().count(b"metrics.written") if self.passed.is_file() else 0

    def until(self, boundaries: int) -> bool:
        """Wait until so many are passed; False once the run has finished."""
        return self.wait(lambda: self.progress() >= boundaries)

    def finished(self) -> bool:
        """Whether the training has ended as it should; one that has died is started again."""
        status = self.process.poll()
        if status not in (None, 0):
            assert self.starts < 60, self.log.read_text()[-4000:]
            self.start()
        return status == 0

    def end(self) -> None:
        """Wait until the training has finished."""
        self.wait(lambda: False)

    def left(self) -> list[str]:
        """What is still there of it: processes, where they listen, paths, and control groups."""
        deadline = time.monotonic() + 30
        while (alive := list(ours())) and time.monotonic() < deadline:
            time.sleep(0.5)
        shared = (
            MEMORY / f"mcore_mas-{os.getuid()}"
        )  # of all of this user's runs, and empty after each
        paths = [
            str(path)
            for folder in (self._temporary, MEMORY)
            for path in folder.rglob("*")
            if path != shared
        ]
        for driver in self._drivers:
            paths += map(str, Path("/sys/fs/cgroup").rglob(f"{PREFIX}{driver}-*"))
        return [
            f"process {process.pid} {process.name()} at ports {list(ports(process))}"
            for process in alive
        ] + paths

    def wait(self, happened: Callable[[], bool]) -> bool:
        """Wait until something has happened, starting what has died; False once the run has finished."""
        deadline = time.monotonic() + WAIT_S
        while not happened():
            if self.finished():
                return False
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return True

    def part(self, name: str) -> psutil.Process | None:
        """The driver, or the process of a rank or an engine; None if it is not there now."""
        if name == "driver":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        title = {"rank": "ray::TrainerRank", "engine": "ray::Host"}[name]
        for process in ours():
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(title):
                    return process
        return None

    def signal(self, part: str, number: int, seconds: float = 0.0) -> bool:
        """Send a signal to a part; with `seconds` it goes on after them. False if the part is not there now."""
        process = self.part(part)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            if seconds:
                time.sleep(seconds)
                process.send_signal(signal.SIGCONT)
        return True

    def full(self, places: str) -> bool:
        """The disk is full at the next pass of a place."""
        before = self.progress()
        self.order(f"{places}=full")
        seen = lambda: self.passed.read_text().splitlines()[before:]  # noqa: E731
        met = self.wait(lambda: any(fnmatch(place, places) for place in seen()))
        self.order("")
        return met

    def lie(self, name: str, times: int = 3) -> bool:
        """The proxy does something to the next answers of the retriever."""
        self._web.faulty = (name, times)
        return self.wait(lambda: self._web.faulty[1] == 0)

    def clock(self, seconds: float) -> bool:
        """The wall clock jumps."""
        self._clock.write_text(str(seconds))
        return True


def ours() -> Iterator[psutil.Process]:
    """Processes of runs of this chaos."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get(MARK) == str(os.getpid())
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process


def ports(process: psutil.Process) -> Iterator[int]:
    """Where a process listens."""
    with suppress(psutil.Error):
        for own in process.net_connections("inet"):
            if own.status == psutil.CONN_LISTEN:
                yield own.laddr.port


def faults(run: Run, retriever: Retriever) -> dict[str, Callable[[], bool]]:
    """What can happen, by name; each says whether it did."""
    kills = {
        f"kill {part}": lambda part=part: run.signal(part, signal.SIGKILL)
        for part in ("driver", "rank", "engine")
    }
    stops = {
        f"stop {part} for 2 s": lambda part=part: run.signal(part, signal.SIGSTOP, 2.0)
        for part in ("driver", "rank", "engine")
    }
    full = {
        f"disk full at {places}": lambda places=places: run.full(places)
        for places in (
            "metrics.begun",
            "file.begun:step_*",
            "chunks.begun:rank*",
            "file.begun:manifest.json",
        )
    }
    lies = {f"retriever's answers: {name}": lambda name=name: run.lie(name) for name in proxy.NAMES}
    clocks = {
        f"clock {hours:+d} h": lambda hours=hours: run.clock(3600.0 * hours) for hours in (-1, 1)
    }
    more = {
        "SIGTERM to driver": lambda: run.signal("driver", signal.SIGTERM),
        "kill retriever": retriever.die,
    }
    return {**kills, **stops, **full, **lies, **clocks, **more}


class Retriever:
    """A retrieval server that can die and come again, at its port."""

    def __init__(self, sidecar: RetrieverSidecar) -> None:
        self._sidecar = sidecar

    def die(self) -> bool:
        os.kill(self._sidecar.pid or 0, signal.SIGKILL)
        time.sleep(1)
        self._sidecar.revive()
        return True


def alone() -> None:
    """Go on in a process whose shared memory nobody else writes to."""
    if ALONE not in os.environ:
        user = () if os.getuid() == 0 else ("--user", "--map-root-user")
        command = [
            "unshare",
            *user,
            "--mount",
            sys.executable,
            "-m",
            "tests.faults.chaos",
            *sys.argv[1:],
        ]
        os.execvpe(command[0], command, {**os.environ, ALONE: "1"})
    subprocess.run(["mount", "-t", "tmpfs", "memory", "/dev/shm"], check=True)


@contextmanager
def stage(base: Path, more: Sequence[str]) -> Iterator[tuple[Path, Retriever, proxy.FaultProxy]]:
    """A run's folder, ready to train with `more` settings, and the retriever and the proxy that it asks."""
    bert = bare_folder(base) / "bert"
    write_corpus(base / "passages.jsonl", PASSAGES)
    build_index(base / "passages.jsonl", base / "index", Encoder.of("bge", bert))
    sidecar = RetrieverSidecar(
        base / "index",
        log_path=base / "retriever.log",
        encoder_folder=bert,
        may_restart=lambda: True,
    )
    with sidecar as url, proxy.FaultProxy(url).running() as web:
        run = make_run(
            base, *SETTINGS, *more, f"retriever.urls=[{web.url}]", experiment="demo_search"
        )
        yield run, Retriever(sidecar), web


def disturbed(
    seed: int, number: int, run: Run, retriever: Retriever, total: int, only: str
) -> dict[str, list[float]]:
    """Train with so many faults, spread over the `total` boundaries of an undisturbed run.

    Every fault happens once before one happens twice. Returns the seconds from each to the end of the next step.
    """
    draw, recovered = random.Random(seed), dict[str, list[float]]()
    known = {name: fault for name, fault in faults(run, retriever).items() if only in name}
    names: list[str] = []
    while len(names) < number:
        names += draw.sample(list(known), min(len(known), number - len(names)))
    run.start()
    for done, name in enumerate(names, 1):
        at = run.progress() + draw.randint(1, max(1, total // (3 * number)))
        assert run.until(at), f"seed {seed}: finished before fault {done} of {number}"
        while not known[name]():  # the part is just starting
            assert not run.finished(), f"seed {seed}: finished before {name}"
            time.sleep(0.1)
        began, before = time.monotonic(), run.steps()
        run.wait(lambda before=before: run.steps() > before)
        recovered.setdefault(name, []).append(round(time.monotonic() - began, 1))
        print(
            f"  {done:2d} {name}, in step {before}: the next has ended after {recovered[name][-1]} s",
            flush=True,
        )
    run.end()
    return recovered


def main(
    number: int, seeds: Sequence[int], out: Path | None, only: str, more: Sequence[str]
) -> None:
    """Raises AssertionError if a run comes to other bits, or leaves something behind."""
    base = Path(tempfile.mkdtemp(prefix="ch"))  # a short path: Ray has sockets in it
    recovered: dict[str, list[float]] = {}
    with stage(base, more) as (folder, retriever, web):
        pristine = folder.with_name("pristine")
        shutil.copytree(folder, pristine)
        calm = Run(folder, web, base / "t0")
        calm.start()
        calm.end()
        expected, total = fingerprint(folder), calm.progress()
        print(
            f"undisturbed: {total} boundaries, {len(expected)} files, {calm.starts} start",
            flush=True,
        )
        for seed in seeds:
            began = time.monotonic()
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            print(f"seed {seed}:", flush=True)
            run = Run(folder, web, base / f"t{seed}")
            for name, seconds in disturbed(seed, number, run, retriever, total, only).items():
                recovered.setdefault(name, []).extend(seconds)
            found = fingerprint(folder)
            differ = sorted(
                name for name in {*expected, *found} if expected.get(name) != found.get(name)
            )
            left = run.left()
            took = time.monotonic() - began
            print(
                f"seed {seed}: {number} faults, {run.starts} starts, {took:.0f} s; differ: {differ}; left: {left}"
            )
            for name in differ:
                print(f"{name}: {expected.get(name)}\n{name}: {found.get(name)}", file=sys.stderr)
            assert not differ
            assert not left
    shutil.rmtree(base)
    if out is not None:
        write_json(out, {"faults": number, "seeds": list(seeds), "recovered_s": recovered})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int, nargs="?", default=20)
    parser.add_argument("seeds", type=int, nargs="*", default=(1, 2, 3))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="faults whose names have this in them")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="a setting of the run, such as trainer.staleness=1",
    )
    given = parser.parse_args()
    alone()
    main(given.faults, given.seeds, given.out, given.only, given.set)
