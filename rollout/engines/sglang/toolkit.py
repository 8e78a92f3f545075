"""Compilers for SGLang's servers, which compile kernels when they start."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_TOOLKIT = Path("/usr/local/cuda")  # toolkit of the machine; SGLang looks here last


def compiler_environment(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a server finds nvcc and ninja.

    PATH begins with the `bin` folder of SGLang's environment, which has ninja. CUDA_HOME is set if the
    server would find no nvcc otherwise; it names the toolkit that requirements/sglang.sh assembles
    from the wheels in SGLang's environment.

    Args:
        python: interpreter of SGLang's environment.
        environment: other variables of the server.
    """
    search_path = environment.get("PATH", os.defpath)
    variables = {"PATH": f"{python.parent}{os.pathsep}{search_path}"}
    toolkit = python.parent.parent / "cuda"
    if not _find_nvcc(environment) and _is_executable(toolkit / "bin" / "nvcc"):
        variables["CUDA_HOME"] = str(toolkit)
    return variables


def toolchain_problem(python: Path, environment: Mapping[str, str]) -> str:
    """Return an error that names the compiler which servers would not find, or "".

    Args:
        python: interpreter of SGLang's environment.
        environment: variables that the servers get in addition to those of this process.
    """
    variables = {**os.environ, **environment}
    variables |= compiler_environment(python, variables)
    if not _find_nvcc(variables):
        return (
            f"SGLang compiles kernels when a server starts, and there is no nvcc: not in {python.parent.parent}/cuda, "
            "CUDA_HOME, PATH or /usr/local/cuda; run `bash requirements/sglang.sh` (make setup-sglang), or install the "
            "CUDA toolkit"
        )
    compiler = variables.get("CXX", "c++")
    if shutil.which(compiler, path=variables["PATH"]) is None:
        return (
            f"SGLang compiles kernels when a server starts, and there is no C++ compiler '{compiler}'; install g++, "
            "or name another one in CXX"
        )
    return ""


def _find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """Return the nvcc that SGLang finds with these variables, or None.

    The order of the search is that of `cuda_home` in SGLang's kernels/jit/utils/compile/toolchain.py.
    """
    configured = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured:
        nvcc = Path(configured) / "bin" / "nvcc"
        return nvcc if _is_executable(nvcc) else None
    on_path = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    if on_path:
        return Path(on_path)
    nvcc = _TOOLKIT / "bin" / "nvcc"
    return nvcc if _is_executable(nvcc) else None


def _is_executable(file: Path) -> bool:
    return file.is_file() and os.access(file, os.X_OK)
