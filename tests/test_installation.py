"""Installation on GPU machines: versions of torch and NCCL, and the lock file of each Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
# lock file of the Python that runs the tests
LOCK = "lock-3.12.txt" if sys.version_info >= (3, 12) else "lock.txt"
CU126 = "--index-url https://download.pytorch.org/whl/cu126"


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions in a requirements file, by distribution."""
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_nccl_is_pinned_to_the_version_that_sglangs_torch_requires() -> None:
    """`make lock-nccl` writes the chain of requirements into nccl.txt."""
    (chain,) = re.findall(
        r"^# (sglang==.*)$", (REQUIREMENTS / "nccl.txt").read_text(), re.MULTILINE
    )
    sglang, torch, nccl = chain.split(" -> ")
    assert sglang == f"sglang=={pins('sglang.txt')['sglang']}"
    torch_version = torch.removeprefix("torch==")
    assert f"its own torch ({torch_version})" in (REQUIREMENTS / "sglang.txt").read_text()
    assert nccl == f"nvidia-nccl-cu13=={pins('nccl.txt')['nvidia-nccl-cu13']}"
    assert pins("nccl.txt").keys() == {"nvidia-nccl-cu12", "nvidia-nccl-cu13"}


@pytest.fixture
def pip_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake `python` on PATH that records the arguments of pip; return the file of the record."""
    record = tmp_path / "pip_arguments"
    write_program(
        tmp_path / "python",
        f'if [ "$2" = pip ]; then shift 2; echo "$@" >> {record}; '
        # Transformer Engine and SGLang are installed by scripts with tests of their own
        f'elif [ "$1" = -c ] && [ "$2" != "${{2#import torch}}" ]; then exit 1; '
        f'elif [ "$2" = venv ]; then echo "venv $3" >> {record}; exit 1; '
        f'else exec {sys.executable} "$@"; fi',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA", raising=False)
    return record


def write_program(path: Path, script: str) -> None:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def write_nvidia_smi(folder: Path, cuda: str) -> None:
    """Write a fake `nvidia-smi` whose driver supports this version of CUDA."""
    version = "580.95.05"
    line = f"| NVIDIA-SMI {version}     Driver Version: {version}     CUDA Version: {cuda} |"
    write_program(folder / "nvidia-smi", f"echo '{line}'")


def run_script(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash with its arguments in a folder, with these environment variables."""
    return subprocess.run(
        ["bash", *words],
        cwd=checkout,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def run_post_deploy(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run environment.post-deploy.sh in a copy below a folder, with these environment variables."""
    checkout = folder / "checkout"
    shutil.copytree(REQUIREMENTS, checkout / "requirements")
    shutil.copy(ROOT / "environment.post-deploy.sh", checkout)
    return run_script(checkout, "environment.post-deploy.sh", **variables)


@pytest.mark.parametrize(
    ("driver_cuda", "variable", "index", "nccl"),
    [
        # a login node, or the build of an image
        ("", "", "", "nvidia-nccl-cu13"),
        ("13.0", "", "", "nvidia-nccl-cu13"),
        ("12.8", "", CU126, "nvidia-nccl-cu12"),
        ("12.8", "13", "", "nvidia-nccl-cu13"),
        ("13.2", "12", CU126, "nvidia-nccl-cu12"),
    ],
)
def test_torch_and_nccl_match_the_drivers_cuda(
    pip_arguments: Path, driver_cuda: str, variable: str, index: str, nccl: str
) -> None:
    if driver_cuda:
        write_nvidia_smi(pip_arguments.parent, driver_cuda)
    result = run_post_deploy(pip_arguments.parent, CUDA=variable)
    assert result.returncode == 0, result.stderr
    torch = f"torch=={pins(LOCK)['torch']}"
    assert pip_arguments.read_text().splitlines()[:4] == [
        f"install {index} {torch}" if index else f"install {torch}",
        f"install --requirement requirements/{LOCK} --requirement requirements/gpu.txt",
        f"install --no-deps {nccl}=={pins('nccl.txt')[nccl]}",
        "install --no-deps --no-build-isolation --editable .",
    ]
    # What only some runs need may fail, with a line.
    assert "continuing without Transformer Engine, which only layers: te needs" in result.stderr
    made_sglang = "venv .venv-sglang" in pip_arguments.read_text()
    assert made_sglang is nccl.endswith("cu13")
    if made_sglang:
        assert "make it later with: bash requirements/sglang.sh" in result.stderr
    else:
        assert "SGLang needs CUDA 13: here the embedded engine samples" in result.stderr


def test_a_driver_that_no_torch_is_built_for_is_refused(pip_arguments: Path) -> None:
    write_nvidia_smi(pip_arguments.parent, "11.8")
    result = run_post_deploy(pip_arguments.parent)
    assert result.returncode == 1
    assert not pip_arguments.exists()
    assert result.stderr.startswith(
        "error: CUDA 11: torch is built for 12 and 13; update the driver, or set CUDA"
    )


# Fake `python` of a machine with a torch for `cuda`; building and loading Transformer Engine exit with
# `builds` and `loads`.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *torch.version.cuda*) echo "{cuda}" ;;
  *pip*transformer-engine*) echo "$@" NVTE=$NVTE_BUILD_USE_NVIDIA_WHEELS JOBS=$MAX_JOBS >> {record}; exit {builds} ;;
  *pip*) echo "$@" >> {record} ;;
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
def test_the_script_of_transformer_engine_reports_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, builds: int, loads: int, last: str
) -> None:
    python = tmp_path / "python"
    record = tmp_path / "pip_arguments"
    python.write_text(FAKE_PYTHON.format(cuda=cuda, builds=builds, loads=loads, record=record))
    (tmp_path / "c++").touch()
    for tool in (python, tmp_path / "c++"):
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = subprocess.run(
        ["bash", "requirements/transformer_engine.sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == (last.startswith("error"))
    assert (result.stdout + result.stderr).splitlines()[-1].startswith(last)
    if cuda:
        headers, engine = record.read_text().splitlines()
        # the headers are of the CUDA that torch was built with
        assert (
            f"cuda-toolkit[cccl,crt,nvcc,profiler]=={cuda}.* nvidia-cudnn-frontend>=1.29 wheel ninja"
            in headers
        )
        assert (
            "--no-build-isolation --requirement requirements/transformer-engine.txt NVTE=1 JOBS=1"
            in engine
        )


@pytest.mark.parametrize(("version", "lock"), [((3, 11), "lock.txt"), ((3, 12), "lock-3.12.txt")])
def test_setup_installs_the_lock_of_its_python(
    tmp_path: Path, version: tuple[int, int], lock: str
) -> None:
    python = tmp_path / "python"
    write_program(
        python, f'exec {sys.executable} -c "import sys; sys.version_info = {version}; $2"'
    )
    command = ["make", "--dry-run", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"requirements/[\w.-]+", result.stdout) == [f"requirements/{lock}"] * 2


@pytest.mark.parametrize(
    ("working", "expected"),
    [(("3.11", "3.12"), "python3.12"), (("3.11",), "python3.11"), ((), "python3.12")],
)
def test_setup_uses_a_python_that_works(
    tmp_path: Path, working: tuple[str, ...], expected: str
) -> None:
    """With pyenv, the commands of both versions may exist without working."""
    for version in ("3.11", "3.12"):
        write_program(tmp_path / f"python{version}", f"exit {0 if version in working else 127}")
    commands = dry_run_setup(tmp_path / "venv", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert f"\n{expected} -m venv {tmp_path / 'venv'}\n" in commands


def test_setup_keeps_the_python_of_an_existing_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    commands = dry_run_setup(tmp_path / "venv")
    assert re.findall(r"requirements/[\w.-]+", commands) == [f"requirements/{LOCK}"] * 2


def dry_run_setup(venv: Path, **variables: str) -> str:
    """Return the commands that `make setup` would run, with these environment variables."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")
    }
    result = subprocess.run(
        ["make", "--dry-run", "setup", f"VENV={venv}"],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_setup_on_a_machine_with_gpus_is_the_second_stage_of_the_conda_environment(
    tmp_path: Path,
) -> None:
    write_program(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3'")
    path = f"{tmp_path}:{os.environ['PATH']}"
    commands = dry_run_setup(tmp_path / "venv", PATH=path)
    assert f'PATH="{tmp_path / "venv"}/bin:$PATH" bash environment.post-deploy.sh' in commands
    assert "pip check" not in commands  # torch pins another NCCL than SGLang's
    assert "post-deploy" not in dry_run_setup(tmp_path / "venv", PATH=path, MAKEFLAGS="GPUS=")


# Fake `python` that makes a fake environment: its pip writes the files of the wheels of a GPU machine.
FAKE_VENV = """
case "$*" in
  *ensurepip*) exit 0 ;;
  *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"-m pip install"*)
    echo "$@" >> "{record}"
    wheels=.venv-sglang/lib/python3.12/site-packages/nvidia/cu13
    mkdir -p $wheels/bin $wheels/include $wheels/nvvm $wheels/lib
    touch $wheels/include/cuda.h $wheels/lib/libcudart.so.13 $wheels/lib/libnvrtc.so.13
    printf '#!/bin/sh\\necho nvcc' > $wheels/bin/nvcc && chmod +x $wheels/bin/nvcc ;;
  *) echo "$@" >> "{record}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the requirements, on a machine whose programs are stand-ins."""
    folder = tmp_path / "checkout"
    shutil.copytree(REQUIREMENTS, folder / "requirements")
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "python", FAKE_VENV.format(record=tmp_path / "record"))
    write_program(programs / "getconf", "echo glibc 2.36")
    write_program(programs / "df", "echo Avail; echo 99999999")
    write_program(programs / "ldconfig", "echo 'libcuda.so.1 (libc6,x86-64) => /lib/libcuda.so.1'")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA", raising=False)
    return folder


def make_sglang(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Make SGLang's environment by requirements/sglang.sh, with these environment variables."""
    return run_script(checkout, "requirements/sglang.sh", "python", **variables)


@pytest.mark.parametrize("image", [True, False])
def test_sglangs_environment_has_a_toolkit_that_a_linker_finds(
    checkout: Path, tmp_path: Path, image: bool
) -> None:
    """With a driver of CUDA 13, or in the build of an image, which has none."""
    if not image:
        write_nvidia_smi(tmp_path / "programs", "13.0")
    result = make_sglang(checkout, **({"CUDA": "13"} if image else {}))
    assert result.returncode == 0, result.stderr
    assert "--requirement requirements/sglang.txt" in (tmp_path / "record").read_text()
    home = checkout / ".venv-sglang"
    assert (home / ".stamp").is_file()
    nvcc = subprocess.run([home / "cuda/bin/nvcc"], capture_output=True, text=True, check=True)
    assert nvcc.stdout.strip() == "nvcc"
    assert (home / "cuda/include/cuda.h").is_file()
    for name in ("libcudart.so", "libcudart.so.13", "libnvrtc.so"):
        assert (home / "cuda/lib64" / name).is_file()
    assert (home / "cuda/lib64/stubs/libcuda.so").readlink() == Path("/lib/libcuda.so.1")


def test_a_machine_that_cannot_run_sglangs_wheels_is_told_before_they_are_downloaded(
    checkout: Path, tmp_path: Path
) -> None:
    write_nvidia_smi(tmp_path / "programs", "12.8")
    result = make_sglang(checkout)
    assert result.returncode == 1
    assert "SGLang's wheels need CUDA 13, and the driver has CUDA 12" in result.stderr

    write_program(tmp_path / "programs" / "getconf", "echo glibc 2.31")
    result = make_sglang(checkout, CUDA="13")
    assert result.returncode == 1
    assert "SGLang's wheels need glibc 2.34, and this system has glibc 2.31" in result.stderr
    assert not (checkout / ".venv-sglang").exists()


def test_without_gpus_sglangs_packages_for_cpus_are_installed(
    checkout: Path, tmp_path: Path
) -> None:
    result = make_sglang(checkout)
    assert result.returncode == 0, result.stderr
    assert "--requirement requirements/sglang-cpu.txt" in (tmp_path / "record").read_text()
    assert not (checkout / ".venv-sglang" / "cuda").exists()


@pytest.mark.parametrize("file", ["gpu.Dockerfile", "gpu.def"])
def test_an_image_names_its_sglang(file: str) -> None:
    """The second stage makes it, because the build of an image sets CUDA."""
    text = (ROOT / "containers" / file).read_text()
    assert re.search(r"CUDA=.* bash environment\.post-deploy\.sh", text)
    assert "SGLANG_PYTHON=/opt/mcore-mas/.venv-sglang/bin/python" in text
