"""Number of visible GPUs, and runs on CPUs, which hide the GPUs from their processes."""

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


def test_visible_gpus_are_counted_if_torch_is_built_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    specs = {"torch": SimpleNamespace(origin=str(torch / "__init__.py"))}
    monkeypatch.setattr(machine.importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(machine, "Path", lambda path: devices if path == "/dev" else Path(path))
    assert count_visible_gpus() == 0  # torch is built for CPUs

    (torch / "lib" / "libtorch_cuda.so").touch()
    for visible, count in ((None, 3), ("", 0), ("-1", 0), ("1", 1), ("0,2", 2), ("0,1,2,3", 3)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_visible_gpus() == count


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("auto", "3"), ("cuda", "3")])
def test_a_run_on_cpus_hides_the_gpus_from_its_processes(
    device: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = RunConfig.from_values(
        resolve(["experiment=demo_math", f"cluster.device={device}"]), "a test"
    )
    with hide_gpus_from_cpu_run(config):
        command = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        assert child.stdout.strip() == visible
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with hide_gpus_from_cpu_run(config):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if device == "cpu" else None)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
