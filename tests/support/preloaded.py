"""Preparation of the process from which ranks and programs of tests are forked."""

import atexit
import ctypes
import re
import weakref
from pathlib import Path

import pytest
import torch._dynamo.utils

import tests.support.preloaded_modules  # noqa: F401
from mcore_mas.tracking.mlflow_store import set_mlflow_variables
from tests.support import ray_forks


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


# At the exit of every fork, torch would unregister its operators, one by one, and make a table of compilations.
atexit.unregister(torch._dynamo.utils.dump_compile_times)
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False

ray_forks.leave_out_idle_processes(pytest.MonkeyPatch())
set_mlflow_variables()
_collapse_memory()
