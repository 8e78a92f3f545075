"""Training on a disk that is full for some seconds after the first step.

Its files must be those of a training on a disk with enough space. A third training has its log on the
full disk too.

`unshare --user --map-root-user --mount python -m tests.faults.full FOLDER` mounts a file system in
memory on FOLDER.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_mas.training import train
from mcore_mas.training.metrics import StepMetrics
from tests.faults.forked import fingerprint, forked, run_folder
from tests.support.in_process import training_here

DISK_MIB = 48
FULL_S = 5.0


def main(results: Path) -> None:
    """Train three times; assert that the full disk neither ends a training nor changes its files.

    Print the warnings about the full disk, and the number of files.
    """
    ballast = results / "ballast"
    log_on_other_disk = results.with_name("log")
    log_on_full_disk = results / "log"

    def work(run: Path, fill_disk: bool) -> None:
        async def after_step(number: int, _: StepMetrics) -> bool:
            if fill_disk and number == 0:
                with ballast.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                threading.Timer(FULL_S, ballast.unlink).start()
            return True

        with pytest.MonkeyPatch.context() as patch, training_here(patch):
            train.train(run / "config.yaml", after_step=after_step)

    def train_in_fork(*, fill_disk: bool, log: Path) -> dict[str, str]:
        """Make a run, train it in a fork, and remove it; return the digests of its files."""
        status = forked(lambda: run_folder(results), log_on_other_disk)
        assert status == 0, log_on_other_disk.read_text()
        (run,) = (path for path in results.iterdir() if path.is_dir())
        assert forked(lambda: work(run, fill_disk), log) == 0, log.read_text()
        digests = fingerprint(run)
        permissions = (run / "train").stat().st_mode & 0o777
        assert permissions == 0o700  # only this user may read the weights
        shutil.rmtree(run)
        return digests

    expected = train_in_fork(fill_disk=False, log=log_on_other_disk)
    for log in (log_on_other_disk, log_on_full_disk):
        digests = train_in_fork(fill_disk=True, log=log)
        differing = [name for name in expected if expected[name] != digests.get(name)]
        assert digests == expected, differing
    for line in log_on_other_disk.read_text().splitlines():
        if "is full" in line:
            print(line)
    print(len(expected))


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "disk", disk], check=True)
    main(disk)
