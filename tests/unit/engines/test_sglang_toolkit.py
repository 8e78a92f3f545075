"""Servers of SGLang find nvcc, ninja and a C++ compiler, or a check says which one is missing."""

import os
from pathlib import Path

import pytest

from mcore_mas.cli import doctor
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline import check
from rollout.engines.sglang import toolkit
from rollout.engines.sglang.toolkit import compiler_environment, toolchain_problem


def write_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a machine with a driver, programs, and SGLang's environment without a toolkit."""
    monkeypatch.setattr(toolkit, "_TOOLKIT", tmp_path / "usr_local_cuda")
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    write_program(tmp_path / "programs" / "c++")
    write_program(tmp_path / "env" / "bin" / "python")
    return tmp_path


def test_a_node_with_the_driver_alone_uses_the_toolkit_of_sglangs_environment(node: Path) -> None:
    python = node / "env" / "bin" / "python"
    environment = {"PATH": str(node / "programs")}
    assert "there is no nvcc: not in" in toolchain_problem(python, environment)
    assert "CUDA_HOME" not in compiler_environment(python, environment)

    write_program(node / "env" / "cuda" / "bin" / "nvcc")
    assert toolchain_problem(python, environment) == ""
    assert compiler_environment(python, environment) == {
        # ninja is a program of SGLang's environment
        "PATH": f"{node / 'env' / 'bin'}:{node / 'programs'}",
        "CUDA_HOME": str(node / "env" / "cuda"),
    }


@pytest.mark.parametrize("compiler", ["usr_local_cuda/bin/nvcc", "programs/nvcc", "home/bin/nvcc"])
def test_a_toolkit_of_the_machine_comes_first(node: Path, compiler: str) -> None:
    python = node / "env" / "bin" / "python"
    write_program(node / "env" / "cuda" / "bin" / "nvcc")
    write_program(node / compiler)
    environment = {"PATH": str(node / "programs")}
    if compiler.startswith("home"):
        environment["CUDA_HOME"] = str(node / "home")
    assert "CUDA_HOME" not in compiler_environment(python, environment)
    assert toolchain_problem(python, environment) == ""


def test_a_missing_compiler_is_named(node: Path) -> None:
    python = node / "env" / "bin" / "python"
    write_program(node / "env" / "cuda" / "bin" / "nvcc")
    (node / "programs" / "c++").unlink()
    environment = {"PATH": str(node / "programs")}
    assert "there is no C++ compiler 'c++'; install g++" in toolchain_problem(python, environment)
    write_program(node / "programs" / "clang++")
    assert toolchain_problem(python, environment | {"CXX": "clang++"}) == ""


def test_check_and_doctor_name_a_missing_compiler_before_anything_starts(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = node / "env" / "bin" / "python"
    monkeypatch.setattr(check, "count_visible_gpus", lambda: 8)
    monkeypatch.setattr(doctor, "count_visible_gpus", lambda: 8)
    monkeypatch.setattr("rollout.engines.sglang.nccl.nccl_version", lambda _: "2.30.7")
    monkeypatch.setenv("SGLANG_PYTHON", str(python))
    config = RunConfig.from_values(resolve(["experiment=drmas_t1_4b_shared_drmas"]), "a test")
    assert config.engine.python == python  # as an image with SGLang says

    def problems() -> list[str]:
        return [line for line in check.machine_problems(config) if "engine.python" in line]

    [problem] = problems()
    assert problem.startswith("engine.python: SGLang compiles kernels when a server starts")
    assert doctor._check_sglang()[0] is False

    write_program(node / "env" / "cuda" / "bin" / "nvcc")
    assert problems() == []
    assert doctor._check_sglang() == (True, f"{python}, with nvcc and a C++ compiler")

    python.unlink()
    [problem] = problems()
    assert problem.endswith("no such interpreter; `make setup-sglang` makes it (docs/engines.md)")
    passed, finding = doctor._check_sglang()
    assert passed and finding.startswith(f"none: {python} is missing")
    assert os.environ["PATH"] == str(node / "programs")
