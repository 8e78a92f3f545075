"""A Ray that runs already: an address where none answers, and a claim of docs/cluster.md about gloo."""

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.errors import ClusterError
from rollout.base.network import free_port


@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Connection refused"), ("no.such.host.invalid", "known")]
)
def test_an_address_where_no_ray_answers_is_refused_at_once(
    host: str, reason: str, tmp_path: Path
) -> None:
    address = f"{host}:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ClusterError) as caught, joined_ray(address, tmp_path):
        pass
    message = str(caught.value)
    assert message.startswith(f"cluster.address: {address}: this machine cannot join a Ray there (")
    assert reason in message
    assert "\n" not in message
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_gloo_of_this_wheel_has_no_tls_as_the_page_says() -> None:
    program = """
import os, torch.distributed as dist
os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1 and result.stderr.rstrip().endswith("unsupported gloo device")
    page = (Path(__file__).parents[3] / "docs/cluster.md").read_text()
    assert f"torch {version('torch').partition('+')[0]})" in page
