"""Micro-batches in Ray's object store: exact, and without copies."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from mcore_mas.equations.losses import LOSSES, Objective, Statistics, TokenBatch
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.runtime import shared_microbatches
from mcore_mas.runtime.shared_microbatches import map_microbatches, share_microbatches
from tests.support import ranks, reference


def make_microbatch(routing: torch.Tensor | None = None) -> Microbatch:
    [microbatch] = pack(reference.make_samples()[:1], 1 << 20)
    return replace(microbatch, routing=routing)


def test_all_fields_arrive_as_views_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert after.data_ptr() == shared[0][name].ctypes.data
        else:
            assert after == before, name


def writing_loss(tokens: TokenBatch, old: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
    """Return the losses of imitation; overwrite the advantages."""
    tokens.advantages.fill_(7.0)
    return -tokens.logprobs, {}


def test_a_loss_that_writes_to_columns_leaves_the_store_as_it_was(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "writing", writing_loss)
    stored: list[Any] = []
    monkeypatch.setattr(shared_microbatches.ray, "put", stored.append)
    batches = pack(reference.make_samples(), 1000)
    share_microbatches(batches)
    before = [fields["advantages"].copy() for fields in stored[0]]

    reference.make_model("qwen2", tmp_path)
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path), objective=Objective(loss="writing")))
    metrics = trainer.update(map_microbatches(stored[0]))
    assert metrics["grad_norm"] > 0
    for fields, advantages in zip(stored[0], before, strict=True):
        np.testing.assert_array_equal(fields["advantages"], advantages)


@pytest.mark.slow
def test_micro_batches_take_no_memory_of_the_process_that_reads_them(running_ray: None) -> None:
    routing = torch.arange(64 << 20, dtype=torch.int64).to(torch.uint8).view(16, -1)
    large = make_microbatch(routing)
    large = replace(large, weights=torch.zeros(8 << 20))

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
    total, after = ray.get(reader.read.remote(share_microbatches([large])))
    assert total == int(routing.sum(dtype=torch.int64))
    assert after - before < 16 << 10
