"""Micro-batches in Ray's object store: exact, and without copies of large routings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.packing.pack import pack
from mcore_mas.runtime import shared_microbatches
from mcore_mas.runtime.shared_microbatches import map_microbatches, share_microbatches
from tests.support import reference


def make_microbatch(routing: torch.Tensor | None = None) -> Microbatch:
    [microbatch] = pack(reference.make_samples()[:1], 1 << 20)
    return replace(microbatch, routing=routing)


def test_all_fields_arrive_and_only_the_routing_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(shared_microbatches.ray, "put", stored.append)
    tokens = len(make_microbatch().token_ids)
    microbatch = make_microbatch(torch.full((tokens, 3), 7, dtype=torch.uint8))
    share_microbatches([microbatch])
    [shared] = stored
    for value in shared[0].values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False  # as in Ray's store

    [mapped] = map_microbatches(shared)
    for name in Microbatch.__slots__:
        before = getattr(microbatch, name)
        after = getattr(mapped, name)
        if isinstance(before, torch.Tensor):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        else:
            assert after == before, name
    assert mapped.routing is not None
    assert mapped.routing.data_ptr() == shared[0]["routing"].ctypes.data

    # a loss may write to all other tensors
    advantages = microbatch.advantages.clone()
    mapped.advantages.mul_(2.0).add_(1.0)
    assert torch.equal(microbatch.advantages, advantages)
    assert torch.equal(mapped.advantages, 2.0 * advantages + 1.0)


@pytest.mark.slow
def test_a_routing_takes_no_memory_of_the_process_that_reads_it(running_ray: None) -> None:
    routing = torch.arange(64 << 20, dtype=torch.int64).to(torch.uint8).view(16, -1)

    @ray.remote
    class Reader:
        def read(self, shared: Any) -> tuple[int, int]:
            """Return the sum of the routing, and the anonymous memory of the process in KiB."""
            [mapped] = map_microbatches(shared)
            total = 0 if mapped.routing is None else int(mapped.routing.sum(dtype=torch.int64))
            status = Path("/proc/self/status").read_text()
            return total, int(re.findall(r"RssAnon:\s+(\d+)", status)[0])

    reader = Reader.remote()
    _, before = ray.get(reader.read.remote(share_microbatches([make_microbatch()])))
    total, after = ray.get(reader.read.remote(share_microbatches([make_microbatch(routing)])))
    assert total == int(routing.sum(dtype=torch.int64))
    assert after - before < 16 << 10
