"""How many GPUs there are, which a run on CPUs hides from all its processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning import machine
from mcore_mas.planning.machine import count_visible_gpus, hide_gpus_from_cpu_run


def test_gpus_are_those_that_cuda_shows_to_a_torch_that_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    found = SimpleNamespace(origin=str(torch / "__init__.py"))
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: found if name == "torch" else None
    )
    monkeypatch.setattr(machine, "Path", lambda path: devices if path == "/dev" else Path(path))
    assert count_visible_gpus() == 0  # a torch for CPUs
    (torch / "lib" / "libtorch_cuda.so").touch()
    for visible, count in ((None, 3), ("", 0), ("-1", 0), ("1", 1), ("0,2", 2), ("0,1,2,3", 3)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_visible_gpus() == count


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("auto", "3"), ("cuda", "3")])
def test_a_run_on_cpus_shows_its_processes_no_gpu(
    device: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = RunConfig.check(
        resolve(["experiment=demo_math", f"cluster.device={device}"]), "a test"
    )
    with hide_gpus_from_cpu_run(config):
        child = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        assert (
            subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == seen
        )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with hide_gpus_from_cpu_run(config):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == (None if seen else "")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
