"""Every section of the GPU's kit runs: on a GPU without numbers and none but the kit's packages, and on the CPU."""

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
from benchmarks.gpu.__main__ import SECTIONS, read
from rollout.sync.cuda_ipc import serialize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NEEDED = ROOT / "requirements" / "gpu-kit.txt"


class Pickled:
    """What is unpickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    names = [name for name in SECTIONS if name != "meter"]  # which is a process of its own
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.kit_on_meta",
        str(NEEDED),
        *names,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_section_runs_to_its_end(lines: list[dict[str, Any]]) -> None:
    assert [line["left_by"] for line in lines if "left_by" in line] == [
        name for name in SECTIONS if name != "meter"
    ]
    (gap,) = [line for line in lines if line.get("what") == "bfloat16"]
    assert gap["tokens"] == 7 * 144  # seven micro-batches of the small layout
    assert {line["layout"] for line in lines if "triton_ms" in line} == {
        "groups",
        "turns",
        "branches",
        "long",
        "whole",
    }


def test_an_update_that_a_gpu_has_no_room_for_is_left_out(lines: list[dict[str, Any]]) -> None:
    large, small = [
        line
        for line in lines
        if "recompute" in line or ("tokens_per_s" in line and "model" in line)
    ]
    assert large["skipped"] == "needs 117.7 GiB of 74.9"  # 0.96 of 78
    assert (small["model"], small["layout"]) == ("0.5b", "groups") and small[
        "seconds_per_update"
    ] > 0


def test_a_trainer_gives_its_memory_back(lines: list[dict[str, Any]]) -> None:
    """Or the next case of a section would not fit."""
    of = {line["left_by"]: line for line in lines if "left_by" in line}
    # of an earlier mixture Megatron keeps the scale of its auxiliary loss
    assert of["updates"]["peak"] > 8e9 and of["updates"]["bytes"] == 4


def test_the_kit_takes_what_its_requirements_name_and_nothing_else(
    lines: list[dict[str, Any]],
) -> None:
    assert lines[-1] == {"not_imported": []}


def test_on_a_cpu_every_check_of_small_shapes_is_right(tmp_path: Path) -> None:
    """And weights reach another process, which says that they are the same."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this is about machines without a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path)]
    names = ["correctness", "hand_over", "engine", "updates"]
    done = subprocess.run(
        [*command, "--only", ",".join(names)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    found = read(tmp_path / "results.jsonl")
    assert (done.returncode, found[-1]["wrong"]) == (0, [])
    assert [line["model"] for line in found if "tokens_per_s" in line and "model" in line] == [
        "tiny",
        "tiny-moe",
    ]
    assert {line["model"] for line in found if line.get("what", "").endswith("of the CPU")} == {
        "tiny",
        "tiny-moe",
    }
    judged = [(line["section"], line["what"]) for line in found if "ok" in line]
    assert set(judged) == {
        *((names[0], f"attention{how}") for how in ("", ", dense")),
        *((names[0], f"update, {how}") for how in ("again", "sleeps", "restores")),
        *((names[0], f"update, {what} of the CPU") for what in ("logprobs", "gradients")),
        *((names[0], what) for what in ("norm", "head")),
        (names[0], "bfloat16"),
        (names[1], "hand-over, GB/s"),
        (names[2], "engine and trainer"),
    }


def test_a_receiver_finds_the_gpu_by_the_name_that_its_sender_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what a tensor on a GPU is pickled as: class, size, stride, offset, storage, type, device, handle
    payload = serialize(
        Pickled(reductions.rebuild_cuda_tensor, 0, 1, 2, 3, 4, 5, "gpu-1", b"handle")
    )
    opened: list[object] = []
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", lambda *arguments: opened.extend(arguments)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}")
    )
    hand_over.Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    assert opened == [0, 1, 2, 3, 4, 5, 1, b"handle"]
    with pytest.raises(Exception, match=r"posix.getpid is no part of a tensor"):
        hand_over.Unpickler(io.BytesIO(base64.b64decode(serialize(Pickled(os.getpid))))).load()


def test_every_benchmark_can_be_imported() -> None:
    elsewhere = {"benchmarks.support.trl_steps"}  # runs in an environment of TRL's
    paths = sorted((ROOT / "benchmarks").rglob("*.py"))
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths} - elsewhere
    code = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)
