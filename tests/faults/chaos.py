"""Random faults in a training run, whose files must be bitwise identical to those of an undisturbed run.

`python -m tests.faults.chaos [FAULTS [SEED ...]]` injects 20 faults (or FAULTS) into one run for each of the
seeds 1, 2 and 3 (or SEEDs). The run is `mcore-mas train` with its own Ray, one rank, one engine, and a retriever
behind a proxy. A fault kills or stops a process, fills the disk, corrupts answers of the retriever, or moves the clock.
Faults are injected when the run has passed a random number of write boundaries, the failpoints before and after it
writes, moves or removes a file or a folder.

The program mounts its own /dev/shm (`unshare --mount`), so that everything there at the end was left by the run.
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
from tests.faults.forked import PASSAGES, fingerprint, preparation_folder
from tests.support.run_folder import make_run

ROOT = Path(__file__).resolve().parents[2]

# Environment variable that marks every process of a run.
MARK = "MCORE_MAS_CHAOS"

# Environment variable that is set if this process has its own /dev/shm.
ALONE = "MCORE_MAS_CHAOS_ALONE"

# Environment variable with the path of a file that holds the error of the clock in seconds; see
# clock/sitecustomize.py.
CLOCK = "MCORE_MAS_CHAOS_CLOCK"

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
MAX_STARTS = 60
TIMEOUT_S = 900.0  # of every wait

Fault = Callable[[], bool]  # returns False if the fault could not be injected yet


class Run:
    """Training run in processes of its own, with the faults that can be injected into it.

    Args:
        folder: run folder.
        retriever_proxy: proxy between the run and its retriever.
        temporary: folder that the run gets as TMPDIR; the files of this class lie beside it.

    Attributes:
        process: driver of the latest start.
        starts: number of starts so far.
        log: output of all starts.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, retriever_proxy: proxy.FaultProxy, temporary: Path) -> None:
        self._folder = folder
        self._retriever_proxy = retriever_proxy
        self._temporary = temporary
        self._passed_file = temporary.with_name("passed")  # failpoints passed, one a line
        self._orders_file = temporary.with_name("orders")
        self._clock_file = temporary.with_name("clock")
        self._driver_pids: list[int] = []  # one for each start
        self.log = temporary.with_name("chaos.log")
        self.starts = 0
        temporary.mkdir()
        self._passed_file.unlink(missing_ok=True)
        self.order("")
        self.set_clock(0)

    def order(self, orders: str) -> None:
        """Set what the run's failpoints do, such as "metrics.begun=full"; "": only list the boundaries."""
        partial = self._orders_file.with_suffix(".new")
        partial.write_text(f"*=list:{self._passed_file};{orders}")
        partial.replace(self._orders_file)

    def start(self) -> None:
        """Start the training, or continue it."""
        self.starts += 1
        environment = {
            **os.environ,
            MARK: str(os.getpid()),
            FAILPOINTS: f"@{self._orders_file}",
            CLOCK: str(self._clock_file),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "faults" / "clock"), str(ROOT))),
            "TMPDIR": str(self._temporary),
        }
        command = [sys.executable, "-m", "mcore_mas", "train", str(self._folder / "config.yaml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._driver_pids.append(self.process.pid)

    def boundaries(self) -> int:
        """Return the number of write boundaries that the run has passed, in all starts."""
        with suppress(FileNotFoundError):
            return self._passed_file.read_bytes().count(b"\n")
        return 0

    def steps(self) -> int:
        """Return the number of finished steps; a step that a restart repeats counts again."""
        with suppress(FileNotFoundError):
            return self._passed_file.read_bytes().count(b"metrics.written")
        return 0

    def restart_if_dead(self) -> bool:
        """Start the training again if it has failed; return True if it has finished."""
        status = self.process.poll()
        if status not in (None, 0):
            assert self.starts < MAX_STARTS, self._end_of_log()
            self.start()
        return status == 0

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition is true, restarting the training if it fails; return False if it finishes first."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.restart_if_dead():
                return False
            assert time.monotonic() < deadline, self._end_of_log()
            time.sleep(0.1)
        return True

    def wait_for_boundaries(self, count: int) -> bool:
        """Wait until the run has passed `count` boundaries; return False if it finishes first."""
        return self.wait(lambda: self.boundaries() >= count)

    def wait_for_end(self) -> None:
        """Wait until the training has finished."""
        self.wait(lambda: False)

    def leftovers(self) -> list[str]:
        """Describe the processes, files and control groups of the run that still exist."""
        deadline = time.monotonic() + 30
        processes = list(marked_processes())
        while processes and time.monotonic() < deadline:
            time.sleep(0.5)
            processes = list(marked_processes())
        leftovers = [
            f"process {process.pid} {process.name()} at ports {listening_ports(process)}"
            for process in processes
        ]

        # These folders belong to all runs of this user. They stay, and are empty.
        user_folders = (
            MEMORY / f"mcore_mas-{os.getuid()}",
            self._temporary / f"ray-{os.getuid()}",
        )
        for folder in (self._temporary, MEMORY):
            leftovers += [str(path) for path in folder.rglob("*") if path not in user_folders]
        for pid in self._driver_pids:
            leftovers += [str(path) for path in Path("/sys/fs/cgroup").rglob(f"{PREFIX}{pid}-*")]
        return leftovers

    def find_process(self, part: str) -> psutil.Process | None:
        """Return the process of the driver, a rank or an engine; None if it does not run now."""
        if part == "driver":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        title = {"rank": "ray::TrainerRank", "engine": "ray::EngineActor"}[part]
        for process in marked_processes():
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(title):
                    return process
        return None

    def send_signal(self, part: str, number: int) -> bool:
        """Send a signal to the driver, a rank or an engine; return False if it does not run now."""
        process = self.find_process(part)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return True

    def stop(self, part: str, seconds: float) -> bool:
        """Stop the driver, a rank or an engine for some seconds; return False if it does not run now."""
        process = self.find_process(part)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
        return True

    def fill_disk(self, pattern: str) -> bool:
        """Let the run find a full disk at the next write boundary that matches the pattern.

        Returns:
            False if the training finishes before it comes to such a boundary.
        """
        earlier_boundaries = self.boundaries()
        self.order(f"{pattern}=full")

        def passed() -> bool:
            boundaries = self._passed_file.read_text().splitlines()[earlier_boundaries:]
            return any(fnmatch(boundary, pattern) for boundary in boundaries)

        was_passed = self.wait(passed)
        self.order("")
        return was_passed

    def corrupt_answers(self, fault: str, count: int = 3) -> bool:
        """Let the proxy inject a fault into the retriever's next `count` answers; wait until it has.

        Returns:
            False if the training finishes before `count` answers had the fault.
        """
        self._retriever_proxy.faulty = (fault, count)
        return self.wait(lambda: self._retriever_proxy.faulty[1] == 0)

    def set_clock(self, error_s: float) -> bool:
        """Shift the wall clock of all processes of the run by some seconds; return True, as it always succeeds."""
        self._clock_file.write_text(str(error_s))
        return True

    def _end_of_log(self) -> str:
        return self.log.read_text()[-4000:]


def marked_processes() -> Iterator[psutil.Process]:
    """Yield the processes of the runs that this program has started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(MARK)
            if mark == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def listening_ports(process: psutil.Process) -> list[int]:
    """Return the ports that a process listens at."""
    ports = []
    with suppress(psutil.Error):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                ports.append(connection.laddr.port)
    return ports


def faults_of(run: Run, retriever: Retriever) -> dict[str, Fault]:
    """Return all faults that can be injected, by the names that docs/reliability.yaml has too."""
    faults: dict[str, Fault] = {
        "SIGTERM to driver": lambda: run.send_signal("driver", signal.SIGTERM),
        "kill retriever": retriever.kill_and_revive,
    }
    for part in ("driver", "rank", "engine"):
        faults[f"kill {part}"] = lambda part=part: run.send_signal(part, signal.SIGKILL)
        faults[f"stop {part} for 2 s"] = lambda part=part: run.stop(part, 2.0)
    for pattern in (
        "metrics.begun",
        "file.begun:step_*",
        "chunks.begun:rank*",
        "file.begun:manifest.json",
    ):
        faults[f"disk full at {pattern}"] = lambda pattern=pattern: run.fill_disk(pattern)
    for name in proxy.NAMES:
        faults[f"retriever's answers: {name}"] = lambda name=name: run.corrupt_answers(name)
    for hours in (-1, 1):
        faults[f"clock {hours:+d} h"] = lambda hours=hours: run.set_clock(3600.0 * hours)
    return faults


class Retriever:
    """Retrieval server that can be killed and started again at the same port."""

    def __init__(self, sidecar: RetrieverSidecar) -> None:
        self._sidecar = sidecar

    def kill_and_revive(self) -> bool:
        """Kill the server, and start it again after a second; return True, as it always succeeds."""
        assert self._sidecar.pid is not None
        os.kill(self._sidecar.pid, signal.SIGKILL)
        time.sleep(1)
        self._sidecar.revive()
        return True


def isolate_shared_memory() -> None:
    """Restart this program in its own mount namespace, and mount an empty /dev/shm there."""
    if ALONE not in os.environ:
        user = () if os.getuid() == 0 else ("--user", "--map-root-user")
        program = (sys.executable, "-m", "tests.faults.chaos")
        command = ["unshare", *user, "--mount", *program, *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, ALONE: "1"})
    subprocess.run(["mount", "-t", "tmpfs", "memory", "/dev/shm"], check=True)


@contextmanager
def prepared_run(
    base: Path, settings: Sequence[str]
) -> Iterator[tuple[Path, Retriever, proxy.FaultProxy]]:
    """Yield the folder of a run that can start, its running retriever, and the proxy in front of it."""
    bert = preparation_folder(base) / "bert"
    write_corpus(base / "passages.jsonl", PASSAGES)
    build_index(base / "passages.jsonl", base / "index", Encoder.of("bge", bert))
    sidecar = RetrieverSidecar(
        base / "index",
        log_path=base / "retriever.log",
        encoder_folder=bert,
        may_restart=lambda: True,
    )
    with sidecar as url, proxy.FaultProxy(url).running() as retriever_proxy:
        settings = (*SETTINGS, *settings, f"retriever.urls=[{retriever_proxy.url}]")
        folder = make_run(base, *settings, experiment="demo_search")
        yield folder, Retriever(sidecar), retriever_proxy


def draw_faults(generator: random.Random, names: Sequence[str], count: int) -> list[str]:
    """Draw `count` faults at random; each name is drawn once before any is drawn twice."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += generator.sample(names, min(len(names), count - len(drawn)))
    return drawn


def train_with_faults(
    run: Run, faults: dict[str, Fault], *, count: int, seed: int, boundaries: int
) -> dict[str, list[float]]:
    """Train to the end with random faults at random boundaries.

    Args:
        faults: faults to draw from.
        count: number of faults to inject.
        boundaries: number of write boundaries in an undisturbed run, over which the faults are spread.

    Returns:
        For each fault, the seconds from each injection until the next step has ended.
    """
    generator = random.Random(seed)
    names = draw_faults(generator, list(faults), count)
    max_distance = max(1, boundaries // (3 * count))
    recovered_s: dict[str, list[float]] = {}
    run.start()
    for number, name in enumerate(names, 1):
        boundary = run.boundaries() + generator.randint(1, max_distance)
        is_running = run.wait_for_boundaries(boundary)
        assert is_running, f"seed {seed}: finished before fault {number} of {count}"
        while not faults[name]():  # the process is still starting
            assert not run.restart_if_dead(), f"seed {seed}: finished before {name}"
            time.sleep(0.1)

        started = time.monotonic()
        step = run.steps()
        run.wait(lambda step=step: run.steps() > step)
        seconds = round(time.monotonic() - started, 1)
        recovered_s.setdefault(name, []).append(seconds)
        print(
            f"  {number:2d} {name}, in step {step}: next step ended after {seconds} s", flush=True
        )
    run.wait_for_end()
    return recovered_s


def main(
    count: int, seeds: Sequence[int], out: Path | None, only: str, settings: Sequence[str]
) -> None:
    """Train once without faults, and with `count` faults for each seed; compare all files.

    Args:
        out: JSON file to write the times of recovery to.
        only: text that the names of the faults must contain.
        settings: further settings of the run.

    Raises:
        AssertionError: a disturbed run has other files than the undisturbed one, or leaves something behind.
    """
    base = Path(tempfile.mkdtemp(prefix="ch"))  # Ray's sockets need a short path
    recovered_s: dict[str, list[float]] = {}
    with prepared_run(base, settings) as (folder, retriever, retriever_proxy):
        pristine = folder.with_name("pristine")
        shutil.copytree(folder, pristine)
        undisturbed = Run(folder, retriever_proxy, base / "t0")
        undisturbed.start()
        undisturbed.wait_for_end()
        expected = fingerprint(folder)
        boundaries = undisturbed.boundaries()
        print(
            f"undisturbed: {boundaries} write boundaries, {len(expected)} files, "
            f"{undisturbed.starts} start",
            flush=True,
        )

        for seed in seeds:
            print(f"seed {seed}:", flush=True)
            started = time.monotonic()
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            run = Run(folder, retriever_proxy, base / f"t{seed}")
            faults = {
                name: inject for name, inject in faults_of(run, retriever).items() if only in name
            }
            times = train_with_faults(run, faults, count=count, seed=seed, boundaries=boundaries)
            for name, seconds in times.items():
                recovered_s.setdefault(name, []).extend(seconds)

            digests = fingerprint(folder)
            names = {*expected, *digests}
            differing = sorted(name for name in names if expected.get(name) != digests.get(name))
            leftovers = run.leftovers()
            print(
                f"seed {seed}: {count} faults, {run.starts} starts, "
                f"{time.monotonic() - started:.0f} s; differ: {differing}; "
                f"left: {leftovers}"
            )
            for name in differing:
                print(f"{name}: {expected.get(name)}\n{name}: {digests.get(name)}", file=sys.stderr)
            assert not differing
            assert not leftovers
    shutil.rmtree(base)
    if out is not None:
        write_json(out, {"faults": count, "seeds": list(seeds), "recovered_s": recovered_s})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", type=int, nargs="?", default=20)
    parser.add_argument("seeds", type=int, nargs="*", default=(1, 2, 3))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="text that the names of the faults contain")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        help="a setting of the run, such as trainer.staleness=1",
    )
    arguments = parser.parse_args()
    isolate_shared_memory()
    main(arguments.faults, arguments.seeds, arguments.out, arguments.only, arguments.settings)
