"""Sections of the GPU kit on the metered `meta` device, of published models on small layouts.

    python -m tests.support.kit_on_meta requirements/gpu-kit.txt probe updates ...

The run shows that the kit works and that its requirements are complete; its figures mean nothing.
Only torch, Triton, the distributions in the file and those that they require can be imported.
"""

from __future__ import annotations

import gc
import importlib.metadata as metadata
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def normalize(requirement: str) -> str:
    """Return the distribution's normalized name, without version and extras."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def unneeded_modules(required: list[str], modules: Mapping[str, list[str]]) -> set[str]:
    """Return the modules of distributions that are not required, directly or indirectly.

    Args:
        required: names of distributions.
        modules: distributions of each installed module.
    """
    installed = {
        normalize(distribution.name): distribution for distribution in metadata.distributions()
    }
    queue = list(required)
    needed = {"mcore-mas"}
    while queue:
        name = queue.pop()
        if name in needed or name not in installed:
            continue
        needed.add(name)
        for requirement in installed[name].requires or ():
            if "extra ==" not in requirement:
                queue.append(normalize(requirement))
    return {
        module
        for module, distributions in modules.items()
        if needed.isdisjoint(map(normalize, distributions))
    }


class HidingFinder:
    """Import finder that does not find some modules."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] in self._hidden:
            return None
        return self._finder.find_spec(name, *arguments)


def main(requirements_file: str, sections_to_run: list[str]) -> None:
    """Run each section and print the bytes that it leaves on the GPU.

    At the end, print the required distributions that were not imported.
    """
    modules = metadata.packages_distributions()
    lines = Path(requirements_file).read_text().splitlines()
    required = [normalize(line) for line in lines if not line.startswith("#")]
    hidden = unneeded_modules([*required, "torch", "triton"], modules)
    sys.meta_path[:] = [HidingFinder(finder, hidden) for finder in sys.meta_path]  # type: ignore[list-item]
    import torch
    from torch.profiler import profile

    from tests.support.gpu_meter import METER
    from tests.support.gpu_patches import OnMeta, prepare

    prepare()
    torch.cuda.mem_get_info = lambda *_: (78 << 30, 80 << 30)
    # without the activity CUDA, which has nothing to record
    torch.profiler.profile = lambda activities: profile(activities=activities[:1])
    from benchmarks.gpu import machine

    # A second repetition would run nothing new.
    median_seconds = machine.median_seconds
    machine.median_seconds = lambda work, repeats=1: median_seconds(work, repeats=1)
    from benchmarks.gpu import hand_over, sections
    from benchmarks.gpu.shapes import CASES, LAYOUTS, MODELS

    gc.freeze()  # excludes the modules from collections
    CASES[1:-1] = []  # leaves the largest and the smallest case
    LAYOUTS.update(dict.fromkeys(LAYOUTS, LAYOUTS["small"]))
    # All layers are alike, and all chunks of rows but the last one.
    MODELS["1.7b"]["num_hidden_layers"] = 4
    sections.HEAD_ROWS = 2048
    # The receiver of a hand-over is another process, which needs numbers.
    hand_over._measure_hand_over = lambda *_: None
    with OnMeta(), METER:
        for name in sections_to_run:
            # These sections write a file as large as the model, and need its tokenizer.
            needs_tiny_model = name in ("hand_over", "engine")
            sections.SECTIONS[name](tiny=needs_tiny_model)
            figures = {"left_by": name, "bytes": METER.bytes, "peak": METER.peak}
            print(json.dumps(figures), flush=True)
            METER.clear()

    imported = set()
    for name in list(sys.modules):
        imported |= set(map(normalize, modules.get(name.partition(".")[0], ())))
    print(json.dumps({"not_imported": sorted(set(required) - imported)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
