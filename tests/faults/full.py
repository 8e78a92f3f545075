"""A training on a disk of its own that is full after its first step, for some seconds, and one on a disk that is not.

A third one's log lies on the full disk too.

`unshare --user --map-root-user --mount python -m tests.faults.full FOLDER` mounts a file system in memory on FOLDER.
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

MIB, FULL_S = 48, 5.0


def main(results: Path) -> None:
    """Raises AssertionError if the full disk ends the training, or changes what comes of it."""
    ballast, beside, inside = results / "ballast", results.with_name("log"), results / "log"

    def work(run: Path, full: bool) -> None:
        async def after(number: int, _: StepMetrics) -> bool:
            if full and number == 0:
                with ballast.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                threading.Timer(FULL_S, ballast.unlink).start()
            return True

        with pytest.MonkeyPatch.context() as patch, training_here(patch):
            train.train(run / "config.yaml", after_step=after)

    found = []
    for full, log in ((False, beside), (True, beside), (True, inside)):
        assert forked(lambda: run_folder(results), beside) == 0, beside.read_text()
        (run,) = (path for path in results.iterdir() if path.is_dir())
        assert forked(lambda run=run, full=full: work(run, full), log) == 0, log.read_text()
        found.append(fingerprint(run))
        assert (run / "train").stat().st_mode & 0o777 == 0o700  # weights are this user's alone
        shutil.rmtree(run)
    for other in found[1:]:
        assert found[0] == other, [name for name in found[0] if found[0][name] != other.get(name)]
    print(
        *(line for line in beside.read_text().splitlines() if "is full" in line),
        len(found[0]),
        sep="\n",
    )


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MIB}m", "disk", disk], check=True)
    main(disk)
