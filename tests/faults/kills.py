"""SIGKILL at every write boundary of a pipeline, which then starts again and has to come to the same bits.

`python -m tests.faults.kills [sample | K/N]` kills at every boundary, at one of every kind where something is written
and not in place, or at the K-th of every N; the disk is full, too, where something begins to be written. At last
everything is written slowly.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.forked import bare_folder, fingerprint, forked, pipeline, preparation, run_folder


def main(
    sample: bool, share: tuple[int, int], make: Callable[[Path], Path], work: Callable[[Path], None]
) -> None:
    """Raises AssertionError if what was killed comes to something else than what was not."""
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary)
        pristine, passed, log = results / "pristine", results / "passed", results / "log"

        def done(orders: str = "") -> int:
            return forked(lambda: work(folder), log, orders)

        assert forked(lambda: make(results), log) == 0, log.read_text()
        (folder,) = (path for path in results.iterdir() if path.is_dir())
        shutil.copytree(folder, pristine)
        assert done(f"*=list:{passed}") == 0, log.read_text()
        expected, places = fingerprint(folder), passed.read_text().splitlines()

        def check(orders: str, fault: str, ends: tuple[int, ...]) -> None:
            """The work ends with one of these statuses, and started again comes to the same."""
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            log.unlink()
            status = done(orders)
            assert status in ends, f"{fault}: status {status}\n{log.read_text()}"
            if status == 1:
                assert "No space left on device" in log.read_text().splitlines()[-1]
            assert done() == 0, log.read_text()
            found = fingerprint(folder)
            differ = sorted(
                name for name in {*expected, *found} if expected.get(name) != found.get(name)
            )
            assert not differ, f"{fault}: {differ} differ"
            print(f"{fault}: the same {len(found)} files", flush=True)

        kinds = Counter[str]()
        for number, place in enumerate(places, 1):
            kind = re.sub(
                r"\..+\.sha256$|[0-9]+|solver|verifier|train|test|md|csv|html", "N", place
            )
            kinds[kind] += 1
            if number % share[1] != share[0] % share[1]:
                continue
            at = f"pass {number} of {len(places)}, {place}"
            if not sample or (kinds[kind] == 1 and not re.match("file.there|.*begun", place)):
                check(f"*=kill@{number}", f"killed at {at}", (-signal.SIGKILL,))
            full = (
                r"(chunks|checkpoint|metrics|folder)\.begun|file.begun:(step|part|manifest)"
                if sample
                else ".*begun"
            )
            if kinds[kind] == 1 and re.match(full, place):
                check(f"*=full@{number}", f"disk full at {at}", (0, 1))
        check("*=sleep:0.05", f"50 ms more for each of {len(places)} writes", (0,))


if __name__ == "__main__":
    which = sys.argv[1] if sys.argv[1:] else "1/1"
    first, of = (1, 1) if which == "sample" else map(int, which.split("/"))
    for made, worked in ((bare_folder, preparation), (run_folder, pipeline)):
        main(which == "sample", (first, of), made, worked)
