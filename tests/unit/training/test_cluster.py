"""A run's Ray, started in a process of its own: what its workers inherit."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_mas.rollout.base.processes import free_port
from mcore_mas.training.cluster import KEEP_PAGES, ClusterError, joined_ray

_SCRIPT = """
import json, os, resource
import numpy as np, ray
from mcore_mas.training.cluster import KEEP_PAGES, running_ray

@ray.remote
def worker():
    for _ in range(3):  # 64 MiB, or 16,384 pages, each time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(8 << 20)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {name: os.environ.get(name) for name in KEEP_PAGES} | {"faults": faults}

with running_ray(1, 100, keep_pages=True):
    print(json.dumps(ray.get(worker.remote())))
"""


def test_workers_keep_the_memory_that_they_free_unless_the_environment_says_otherwise() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
    environment = inherited | {"MALLOC_TOP_PAD_": "1048576"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("faults") < 100  # the same pages again
    assert seen == KEEP_PAGES | {"MALLOC_TOP_PAD_": "1048576"}


def test_an_address_where_no_ray_answers_is_told_at_once(tmp_path: Path) -> None:
    port = free_port()
    for address, why in ((f"127.0.0.1:{port}", "Connection refused"), ("no.such.host.invalid:6379", "known")):
        began = time.monotonic()
        with pytest.raises(ClusterError) as caught, joined_ray(address, tmp_path):
            pass
        assert str(caught.value).startswith(f"cluster.address: {address}: this machine cannot join a Ray there (")
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - began < 20
