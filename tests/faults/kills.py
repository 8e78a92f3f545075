"""SIGKILL at every write boundary of a pipeline, which must give the same bits after a restart.

`python -m tests.faults.kills [sample | K/N]` kills at every boundary; with `sample` at one boundary of
every action, such as `chunks.written`, and of the files that complete others; with K/N at the
K-th of every N boundaries. It also fills the disk where a write begins. At the end it slows all
writes down.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.faults.forked import (
    fingerprint,
    forked,
    pipeline,
    preparation,
    preparation_folder,
    run_folder,
)

# A sample disturbs the writes of these files too: each completes a checkpoint, a run or a step.
_COMPLETING_FILES = r"manifest\.json|done\.json|step_\d+\.parquet"
# Actions in which `sample` fills the disk
_SAMPLED_FULL = r"(chunks|checkpoint|metrics|folder)\.begun|file.begun:step"


def main(
    *,
    sample: bool,
    first: int,
    stride: int,
    make: Callable[[Path], Path],
    work: Callable[[Path], None],
) -> None:
    """Disturb `work` and run it again; assert that its files are those of undisturbed work.

    Args:
        sample: disturb one boundary of every kind only: of every action, and of the files that complete others.
        first, stride: disturb the boundaries first, first + stride, ...; counted from 1.
        make: makes the folder of the work in another folder.
        work: does the work in its folder.
    """
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary)
        pristine = results / "pristine"
        passed_file = results / "passed"
        log = results / "log"

        def run(orders: str = "") -> int:
            return forked(lambda: work(folder), log, orders)

        assert forked(lambda: make(results), log) == 0, log.read_text()
        (folder,) = (path for path in results.iterdir() if path.is_dir())
        shutil.copytree(folder, pristine)
        assert run(f"*=list:{passed_file}") == 0, log.read_text()
        expected = fingerprint(folder)
        boundaries = passed_file.read_text().splitlines()

        def check(orders: str, fault: str, statuses: tuple[int, ...]) -> None:
            """Assert that the work ends with one of the statuses, and gives the same files when it is run again."""
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            log.unlink()
            status = run(orders)
            assert status in statuses, f"{fault}: status {status}\n{log.read_text()}"
            if status == 1:
                assert "No space left on device" in log.read_text().splitlines()[-1]
            assert run() == 0, log.read_text()
            digests = fingerprint(folder)
            names = {*expected, *digests}
            differing = sorted(name for name in names if expected.get(name) != digests.get(name))
            assert not differing, f"{fault}: {differing} differ"
            print(f"{fault}: the same {len(digests)} files", flush=True)

        seen_kinds: set[str] = set()
        for number, boundary in enumerate(boundaries, 1):
            action, _, name = boundary.partition(":")
            is_completing = re.fullmatch(_COMPLETING_FILES, name)
            kind = re.sub(r"\d+", "N", boundary) if is_completing else action
            is_first = kind not in seen_kinds
            seen_kinds.add(kind)
            if number % stride != first % stride:
                continue
            description = f"pass {number} of {len(boundaries)}, {boundary}"
            # In a sample, boundaries before a write begins and after its end are left out.
            is_sampled = is_first and not re.match("file.there|.*begun", boundary)
            if is_sampled or not sample:
                check(f"*=kill@{number}", f"killed at {description}", (-signal.SIGKILL,))
            if is_first and re.match(_SAMPLED_FULL if sample else ".*begun", boundary):
                check(f"*=full@{number}", f"disk full at {description}", (0, 1))
        check("*=sleep:0.05", f"50 ms more for each of {len(boundaries)} writes", (0,))


if __name__ == "__main__":
    selection = sys.argv[1] if sys.argv[1:] else "1/1"
    is_sample = selection == "sample"
    first, stride = (1, 1) if is_sample else map(int, selection.split("/"))
    for make, work in ((preparation_folder, preparation), (run_folder, pipeline)):
        main(sample=is_sample, first=first, stride=stride, make=make, work=work)
