"""Sections of the GPU kit run on the metered `meta` device with only the kit's packages."""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from benchmarks.gpu import hand_over
from benchmarks.gpu.__main__ import SECTIONS
from rollout.sync.cuda_ipc import serialize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements" / "gpu-kit.txt"
# The section `meter` is left out, because it uses the `meta` device in a process of its own.
SECTION_NAMES = [name for name in SECTIONS if name != "meter"]


class Pickled:
    """Object that is unpickled by calling a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Return the result lines of all sections on the `meta` device."""
    module = ["-m", "tests.support.kit_on_meta", str(REQUIREMENTS), *SECTION_NAMES]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *module],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_every_section_runs_to_its_end(lines: list[dict[str, Any]]) -> None:
    assert [line["left_by"] for line in lines if "left_by" in line] == SECTION_NAMES
    (rounding,) = [line for line in lines if line.get("what") == "bfloat16"]
    assert rounding["tokens"] == 7 * 144  # seven micro-batches of the small layout
    assert {line["layout"] for line in lines if "triton_ms" in line} == {
        "groups",
        "turns",
        "branches",
        "long",
        "whole",
    }


def test_an_update_that_does_not_fit_on_the_gpu_is_skipped(lines: list[dict[str, Any]]) -> None:
    updates = [
        line
        for line in lines
        if "recompute" in line or ("tokens_per_s" in line and "model" in line)
    ]
    largest, smallest = updates
    assert largest["skipped"] == "needs 113.2 GiB of 74.9"  # 74.9 is 0.96 of 78
    assert smallest["model"] == "0.5b"
    assert smallest["layout"] == "groups"
    assert smallest["seconds_per_update"] > 0


def test_a_trainer_frees_its_memory(lines: list[dict[str, Any]]) -> None:
    """Otherwise the next case of the section would not fit."""
    (memory,) = [line for line in lines if line.get("left_by") == "updates"]
    assert memory["peak"] > 8e9
    # Megatron keeps the scale of the auxiliary loss of an earlier mixture of experts.
    assert memory["bytes"] == 4


def test_the_kit_imports_every_package_of_its_requirements(
    lines: list[dict[str, Any]],
) -> None:
    assert lines[-1] == {"not_imported": []}


def test_the_receiver_of_a_tensor_finds_its_gpu_by_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unpickle(payload: str) -> None:
        hand_over.Unpickler(io.BytesIO(base64.b64decode(payload))).load()

    rebuild_arguments: list[object] = []
    # A tensor on a GPU is pickled as a call with its class, size, stride, offset, storage, type,
    # device and handle.
    payload = serialize(
        Pickled(reductions.rebuild_cuda_tensor, 0, 1, 2, 3, 4, 5, "gpu-1", b"handle")
    )
    monkeypatch.setattr(
        reductions,
        "rebuild_cuda_tensor",
        lambda *arguments: rebuild_arguments.extend(arguments),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}")
    )
    unpickle(payload)
    assert rebuild_arguments == [0, 1, 2, 3, 4, 5, 1, b"handle"]
    with pytest.raises(Exception, match=r"posix.getpid is no part of a tensor"):
        unpickle(serialize(Pickled(os.getpid)))
