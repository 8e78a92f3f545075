"""Environments of GPU machines: which torch and NCCL their second stage installs, and which lock is of which Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
CU126 = "--index-url https://download.pytorch.org/whl/cu126"


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_nccl_is_the_one_that_the_servers_torch_needs() -> None:
    """The chain is what the metadata of these releases said (`make lock-nccl`)."""
    (chain,) = re.findall(
        r"^# (sglang==.*)$", (REQUIREMENTS / "nccl.txt").read_text(), re.MULTILINE
    )
    sglang, torch, nccl = chain.split(" -> ")
    assert sglang == f"sglang=={pins('sglang.txt')['sglang']}"
    assert (
        f"its own torch ({torch.removeprefix('torch==')})"
        in (REQUIREMENTS / "sglang.txt").read_text()
    )
    assert nccl == f"nvidia-nccl-cu13=={pins('nccl.txt')['nvidia-nccl-cu13']}"
    assert pins("nccl.txt").keys() == {"nvidia-nccl-cu12", "nvidia-nccl-cu13"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of what `python -m pip install` is asked for, in scripts that find only this Python."""
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then shift 2; echo "$@" >> {asked}; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA", raising=False)
    return asked


def driver(folder: Path, cuda: str) -> None:
    """An `nvidia-smi` of a driver for this version of CUDA."""
    tool = folder / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\necho '| NVIDIA-SMI 580.95.05     Driver Version: 580.95.05     CUDA Version: {cuda} |'\n"
    )
    tool.chmod(0o755)


def staged(**variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "environment.post-deploy.sh"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("smi", "given", "index", "nccl"),
    [
        ("", "", "", "nvidia-nccl-cu13"),  # a login node, or the build of an image
        ("13.0", "", "", "nvidia-nccl-cu13"),
        ("12.8", "", CU126, "nvidia-nccl-cu12"),
        ("12.8", "13", "", "nvidia-nccl-cu13"),
        ("13.2", "12", CU126, "nvidia-nccl-cu12"),
    ],
)
def test_torch_and_nccl_are_of_the_drivers_cuda(
    installed: Path, smi: str, given: str, index: str, nccl: str
) -> None:
    if smi:
        driver(installed.parent, smi)
    done = staged(CUDA=given)
    assert done.returncode == 0, done.stderr
    lock = "lock-3.12.txt" if sys.version_info >= (3, 12) else "lock.txt"
    assert installed.read_text().splitlines() == [
        " ".join(filter(None, ["install", index, f"torch=={pins(lock)['torch']}"])),
        f"install --requirement requirements/{lock} --requirement requirements/gpu.txt",
        f"install --no-deps {nccl}=={pins('nccl.txt')[nccl]}",
        "install --no-deps --no-build-isolation --editable .",
    ]


def test_a_driver_that_no_torch_is_built_for_is_refused(installed: Path) -> None:
    driver(installed.parent, "11.8")
    done = staged()
    assert (done.returncode, installed.exists()) == (1, False)
    assert done.stderr.startswith(
        "error: CUDA 11: torch is built for 12 and 13; update the driver, or set CUDA"
    )


SAYS = """#!/bin/sh
case "$*" in
  *torch.version.cuda*) echo "{cuda}" ;;
  *pip*transformer-engine*) echo "$@" NVTE=$NVTE_BUILD_USE_NVIDIA_WHEELS JOBS=$MAX_JOBS >> {asked}; exit {builds} ;;
  *pip*) echo "$@" >> {asked} ;;
  *"import transformer_engine"*) exit {loads} ;;
esac
"""


@pytest.mark.parametrize(
    ("cuda", "builds", "loads", "last"),
    [
        ("13.0", 0, 0, "Transformer Engine is there: policies may have layers: te"),
        (
            "13.0",
            1,
            0,
            "error: Transformer Engine did not build here (above, pip says why): 'layers: te' is refused",
        ),
        (
            "12.6",
            0,
            1,
            "error: Transformer Engine was built, and cannot be loaded here; on a machine without a GPU's",
        ),
        (
            "",
            0,
            0,
            "error: torch is built without CUDA here: Transformer Engine has nothing to compile against",
        ),
    ],
)
def test_transformer_engine_says_whether_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, builds: int, loads: int, last: str
) -> None:
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(SAYS.format(cuda=cuda, builds=builds, loads=loads, asked=asked))
    (tmp_path / "c++").touch()
    for tool in (python, tmp_path / "c++"):
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "requirements/transformer_engine.sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (last.startswith("error"))
    assert (done.stdout + done.stderr).splitlines()[-1].startswith(last)
    if cuda:  # headers of the toolkit that torch was built with
        headers, engine = asked.read_text().splitlines()
        assert (
            f"cuda-toolkit[cccl,crt,nvcc,profiler]=={cuda}.* nvidia-cudnn-frontend>=1.29 wheel ninja"
            in headers
        )
        assert (
            "--no-build-isolation --requirement requirements/transformer-engine.txt NVTE=1 JOBS=1"
            in engine
        )


@pytest.mark.parametrize(("version", "lock"), [((3, 11), "lock.txt"), ((3, 12), "lock-3.12.txt")])
def test_setup_takes_the_lock_of_its_python(
    tmp_path: Path, version: tuple[int, int], lock: str
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = {version}; $2"\n'
    )
    python.chmod(0o755)
    command = ["make", "--dry-run", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"requirements/[\w.-]+", said) == [f"requirements/{lock}"] * 2


@pytest.mark.parametrize(
    ("runs", "taken"),
    [(("3.11", "3.12"), "python3.12"), (("3.11",), "python3.11"), ((), "python3.12")],
)
def test_setup_takes_the_python_that_runs(
    tmp_path: Path, runs: tuple[str, ...], taken: str
) -> None:
    """As pyenv has them, both commands may be there without running."""
    for version in ("3.11", "3.12"):
        python = tmp_path / f"python{version}"
        python.write_text(f"#!/bin/sh\nexit {0 if version in runs else 127}\n")
        python.chmod(0o755)
    unset = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")
    }
    environment = {**unset, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path / 'venv'}"]
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"\n{taken} -m venv {tmp_path / 'venv'}\n" in said


def test_setup_stays_with_the_python_of_its_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path / 'venv'}"]
    unset = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")
    }
    said = subprocess.run(
        command, cwd=ROOT, env=unset, capture_output=True, text=True, check=True
    ).stdout
    own = "lock-3.12.txt" if sys.version_info >= (3, 12) else "lock.txt"
    assert re.findall(r"requirements/[\w.-]+", said) == [f"requirements/{own}"] * 2
