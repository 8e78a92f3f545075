"""Imports of the process from which ranks and programs of tests are forked."""

import atexit
import ctypes
import gc
import importlib
import re
import weakref
from pathlib import Path

gc.disable()  # modules are no garbage

from tests.support import ray_forks  # noqa: E402

ray_forks.import_ray()

import torch._dynamo.utils  # noqa: E402

import tests.support.in_process  # noqa: E402
import tests.support.ranks  # noqa: E402, F401
from mcore_mas.tracking.mlflow_store import set_mlflow_variables  # noqa: E402

# The modules of jobs and commands, also those that MLflow, Ray and they import when they first use them
set_mlflow_variables()
for name in (
    "alembic.command",
    "git",
    "mcore_mas.cli.main",
    "mcore_mas.evaluation.evaluate",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracing.trace_manager",
    "pyarrow.json",
    "pyarrow.pandas_compat",
    "pydantic.v1",
    "ray._common.usage.usage_lib",
    "ray.dag.compiled_dag_node",
    "ray.dashboard.modules.log.log_manager",
    "rollout.engines.embedded.build",
    "rollout.engines.embedded.host",
    "snakemake.cli",
    "transformers.convert_slow_tokenizer",
):
    importlib.import_module(name)

# At the exit of every fork, torch would unregister its operators, one by one, and make a table of compilations.
atexit.unregister(torch._dynamo.utils.dump_compile_times)
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False

gc.enable()
gc.freeze()  # excludes the modules from the garbage collections of forks


def _collapse_memory() -> None:
    """Move this process's data to huge pages, where the kernel (Linux 6.1) has them.

    A fork copies an entry of the page table for each page: half a gigabyte in small ones takes 45 ms of
    processor time, and in huge ones 18 ms. A program takes three forks.
    """
    madv_collapse = 25
    huge_page = 2 << 20
    libc = ctypes.CDLL(None)
    maps = Path("/proc/self/maps").read_text()
    for first, last in re.findall(
        r"^(\w+)-(\w+) rw-p \w+ 00:00 0 +(?:\[heap\])?$", maps, re.MULTILINE
    ):
        start = -(-int(first, 16) // huge_page) * huge_page
        size = int(last, 16) // huge_page * huge_page - start
        if size > 0:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), madv_collapse)


_collapse_memory()
