"""Pack a folder with which whole trainings run on a machine that has torch and no internet.

    python -m benchmarks.gpu.run_kit --run results/demo_math --out .gpu [--packages]

The folder has:

- `demo/`: the tasks, the cold-started model and the resolved config of a run whose trainers and
  embedded engines share one device and sleep in turn;
- `ray.tar.xz` and `wheels/`, with `--packages`: Ray without the parts that no training loads, and
  the packages that an image with torch, transformers and pyarrow lacks.

`benchmarks.gpu.whole_run` reads it. A kit that is larger than 60 MiB together with the checkout is an error,
because it could not be carried to the machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from packaging.utils import canonicalize_name

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.whole_run_sections import KIT_ROOT
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig

LOCK_FILE = ROOT / "requirements" / "lock-3.12.txt"
DEMO_SETTINGS = (
    "experiment=demo_math",
    "cluster.device=auto",
    "cluster.pool=shared",
    "policies.solver.tp=1",
    "engine.sleep=true",
    "policy_defaults.offload=true",
    "trainer.steps=40",
)
# Ray's wheel is 79 MB; without these folders the compressed rest is 28 MB.
UNUSED_RAY_FOLDERS = (
    "ray/jars",
    "ray/dashboard/client",
    "ray/rllib",
    "ray/serve",
    "ray/tune",
    "ray/train",
    "ray/llm",
)
RAY_PROGRAMS = ("ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
PACKAGES = (
    "annotated-types",
    "jsonschema",
    "jsonschema-specifications",
    "latex2sympy2_extended",
    "math-verify",
    "megatron-core",
    "pydantic",
    "pydantic_core",
    "referencing",
    "rpds-py",
    "tenacity",
    "typing-inspection",
    "wcwidth",
)
# The lock file's 4.9.3, which OmegaConf needs, has no wheel; math-verify takes this version too.
ANTLR = "antlr4-python3-runtime==4.13.2"
MAX_BYTES = 60 << 20  # of the kit and the checkout together
PYTHON_VERSION = "3.12"  # version on the machines without internet
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack the folder that the command line describes, and print its size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run_kit")
    parser.add_argument("--run", type=Path, required=True, help="a run of demo_math, cold-started")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--packages", action="store_true", help="add Ray and missing packages")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    pack_run(options.run, options.out / "demo")
    if options.packages:
        pack_ray(options.out / "ray.tar.xz")
        download_packages([*map(pinned, PACKAGES), ANTLR], options.out / "wheels")
    files = [file for file in options.out.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    checkout = sum(file.stat().st_size for file in tracked_files())
    print(
        f"{options.out}: {len(files)} files, {size / 2**20:.1f} MiB; "
        f"the checkout has {checkout / 2**20:.1f} MiB"
    )
    if size + checkout > MAX_BYTES:
        print(f"error: together they have more than {MAX_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def tracked_files() -> list[Path]:
    """Return the files of the checkout that git tracks; [] outside of a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def pack_run(run: Path, folder: Path, settings: Sequence[str] = DEMO_SETTINGS) -> None:
    """Copy a run's tasks and cold-started model, and write its config for one shared device.

    Args:
        run: folder of a run, with `tasks/` and `bootstrap/model/`.
        folder: folder that is written anew.
        settings: Hydra overrides of the packed config.

    Raises:
        SystemExit: the run has no tasks, or no cold-started model.
    """
    model = run / "bootstrap" / "model"
    for needed in (run / "tasks", model):
        if not needed.is_dir():
            raise SystemExit(f"error: {needed} is not a folder; run the cold start of {run} first")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "tasks", folder / "tasks")
    shutil.copytree(model, folder / "bootstrap" / "model")
    values = resolve([*settings, f"results={KIT_ROOT}"])
    RunConfig.from_values(values, str(folder / "config.yaml"))
    (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def pack_ray(archive: Path) -> None:
    """Download Ray's wheel for PYTHON_VERSION and pack the part of it that a training loads."""
    with tempfile.TemporaryDirectory() as folder:
        download_packages([pinned("ray")], Path(folder))
        (wheel,) = Path(folder).glob("ray-*.whl")
        unpacked = Path(folder) / "unpacked"
        shutil.unpack_archive(wheel, unpacked, "zip")
        for name in UNUSED_RAY_FOLDERS:
            shutil.rmtree(unpacked / name)
        for name in RAY_PROGRAMS:
            (unpacked / name).chmod(0o755)  # a wheel does not say that they are programs
        with tarfile.open(archive, "w:xz") as tar:
            for path in sorted(unpacked.iterdir()):
                tar.add(path, arcname=path.name)


def pinned(name: str) -> str:
    """Return the requirement of a package with the version of the lock file."""
    for line in LOCK_FILE.read_text(encoding="utf-8").splitlines():
        locked_name, _, _ = line.partition("==")
        if canonicalize_name(locked_name) == canonicalize_name(name):
            return line
    raise SystemExit(f"error: {LOCK_FILE} has no version of {name}; write it with `make lock`")


def download_packages(requirements: Sequence[str], folder: Path) -> None:
    """Download the wheels for PYTHON_VERSION on Linux, without their dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON_VERSION, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), *requirements], check=True)


if __name__ == "__main__":
    sys.exit(main())
