"""Sections of the GPU's kit on the meter's GPU, of published models on small layouts; figures mean nothing.

    python -m tests.support.kit_on_meta requirements/gpu-kit.txt probe updates ...

What is installed but neither torch, triton, a line of that file nor required by these cannot be imported.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(name: str) -> str:
    """A distribution's name as an index compares it, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name)[0]).lower()


def others(wanted: list[str], modules: Mapping[str, list[str]]) -> set[str]:
    """Modules of distributions that are neither wanted nor required by one that is."""
    installed = {plain(one.name): one for one in metadata.distributions()}
    queue, there = list(wanted), {"mcore-mas"}
    while queue:
        if (one := queue.pop()) not in there and one in installed:
            there.add(one)
            queue += [
                plain(line) for line in installed[one].requires or () if "extra ==" not in line
            ]
    return {name for name, given in modules.items() if not there & set(map(plain, given))}


class Hides:
    """An importer that knows nothing of some modules."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *given: Any) -> Any:
        return (
            None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, *given)
        )


def main(needed: str, names: list[str]) -> None:
    """Run each section, then print how many bytes it has left on the GPU; at last what was needed and not imported."""
    modules = metadata.packages_distributions()
    wanted = [
        plain(line) for line in Path(needed).read_text().splitlines() if not line.startswith("#")
    ]
    hidden = others([*wanted, "torch", "triton"], modules)
    sys.meta_path[:] = [Hides(finder, hidden) for finder in sys.meta_path]  # type: ignore[list-item]
    import torch
    from torch.profiler import profile as recorder

    from tests.support.fake_gpu import METER, OnMeta, prepare

    prepare()
    torch.cuda.mem_get_info = lambda *_: (78 << 30, 80 << 30)
    torch.profiler.profile = lambda activities: recorder(
        activities=activities[:1]
    )  # of CUDA there is nothing to record
    from benchmarks.gpu import hand_over, sections
    from benchmarks.gpu.shapes import CASES, LAYOUTS

    CASES[1:-1] = []  # the largest and the smallest
    LAYOUTS.update(dict.fromkeys(LAYOUTS, LAYOUTS["small"]))
    hand_over._measure_hand_over = lambda *_: None  # its receiver is a process with numbers
    with OnMeta(), METER:
        for name in names:
            sections.SECTIONS[name](
                tiny=name in ("hand_over", "engine")
            )  # a file as large as the model, and its tokens
            print(
                json.dumps({"left_by": name, "bytes": METER.bytes, "peak": METER.peak}), flush=True
            )
            METER.clear()
    taken = {
        plain(one)
        for name in {name.partition(".")[0] for name in sys.modules}
        for one in modules.get(name, ())
    }
    print(json.dumps({"not_imported": sorted(set(wanted) - taken)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
