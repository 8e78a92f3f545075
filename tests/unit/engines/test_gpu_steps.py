"""Decoding steps on a GPU: their graphs are captured once a size, and follow new weights and sleep.

The graphs here are stand-ins that compute a step again from the tensors that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engines.embedded import batching
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.cache import DecodeBatch
from rollout.engines.embedded.gpu_decoder import GpuDecoder
from rollout.engines.embedded.gpu_steps import DecodingStep, GpuSteps
from rollout.engines.embedded.sampling import sample_on_device, sample_tokens
from rollout.models.architecture import parse_architecture
from rollout.records.trajectory import Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, drain, largest_logprob_error, make_qwen2

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")


class Graphs:
    """Stand-in for CUDA graphs.

    Attributes:
        sizes: number of rows of each captured step, in order.
        replays: number of replays.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0

    def capture(self, step: DecodingStep) -> tuple[tuple[Tensor, Tensor], Callable[[], object]]:
        logits, sampled = (output.clone() for output in step())
        self.sizes.append(len(logits))

        def replay() -> None:
            self.replays += 1
            for output, new in zip((logits, sampled), step(), strict=True):
                output.copy_(new)

        return (logits, sampled), replay


class TableDecoder:
    """Decoder whose logits are a row of a table for each token, plus ten times the position."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.table = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])

    def decode_inputs(
        self, _: Any, token_ids: Tensor, numbers: Tensor, coordinates: Tensor, blocks: Tensor
    ) -> Tensor:
        assert blocks.tolist() == [
            [row, query, 1, position] for query, (row, position) in enumerate(coordinates.tolist())
        ]
        logits: Tensor = self.table[token_ids.long()] + 10 * coordinates[:, 1:]
        return logits


def batch(positions: list[int]) -> DecodeBatch:
    count = len(positions)
    zeros = np.zeros(count, dtype=np.int64)
    return DecodeBatch(
        rows=np.arange(count),
        positions=np.array(positions),
        groups=zeros,
        shared=zeros,
        adapters=zeros,
    )


def make_steps(decoder: Any, capture: Any) -> GpuSteps:
    cache: Any = SimpleNamespace(keys=torch.empty(1, 6, 1, 1, 1))  # of six rows
    return GpuSteps(decoder, cache, capture=capture)


def greedy(steps: GpuSteps, tokens: list[int]) -> tuple[list[list[float]], list[int]]:
    """Run a step at positions 0, 1, ...; return the logits, and the likeliest tokens."""
    count = len(tokens)
    zeros = np.zeros(count, dtype=np.float32)
    step = steps.run(batch(list(range(count))), np.array(tokens), zeros, zeros)
    token_ids, logprobs = step.sampled()
    assert token_ids.dtype == np.int64
    assert logprobs.dtype == np.float32
    expected = step.logits.log_softmax(-1).max(-1).values
    assert logprobs.tolist() == pytest.approx(expected.tolist())
    return step.logits.tolist(), token_ids.tolist()


def test_a_graph_is_captured_for_each_padded_number_of_rows() -> None:
    graphs = Graphs()
    steps = make_steps(TableDecoder(), graphs.capture)
    assert greedy(steps, [2]) == ([[0.0, 0.0, 1.0]], [2])
    assert greedy(steps, [0, 1, 2]) == ([[1, 0, 0], [10, 11, 10], [20, 20, 21]], [0, 1, 2])
    assert greedy(steps, [1, 1, 0, 2])[1] == [1, 1, 0, 2]  # the graph of three rows, padded to four
    assert greedy(steps, [1])[1] == [1]
    assert greedy(steps, [0, 1, 2, 0, 1])[1] == [0, 1, 2, 0, 1]  # no more rows than the cache has
    assert graphs.sizes == [1, 4, 6]
    assert graphs.replays == 5


def test_a_graph_reads_weights_that_are_replaced_in_place() -> None:
    decoder = TableDecoder()
    steps = make_steps(decoder, Graphs().capture)
    assert greedy(steps, [0])[1] == [0]
    decoder.table.copy_(decoder.table.flip(1))
    assert greedy(steps, [0])[1] == [2]


def test_a_gpu_that_captures_nothing_decodes_without_graphs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def refuse(step: DecodingStep) -> Any:
        calls.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    steps = make_steps(TableDecoder(), refuse)
    assert greedy(steps, [1, 2])[1] == [1, 2]
    assert greedy(steps, [2])[1] == [2]
    assert len(calls) == 1
    output = capsys.readouterr()
    assert "not permitted when stream is capturing); the engine goes on without graphs" in (
        output.out + output.err
    )


def test_the_device_samples_the_tokens_of_the_host() -> None:
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(draw.normal(size=(64, 200)).astype(np.float32)) * 3
    temperature = np.repeat(np.array([0.0, 0.5, 1.0, 2.0], dtype=np.float32), 16)
    uniform = draw.random(64, dtype=np.float32)
    expected = sample_tokens(
        logits,
        temperature=temperature,
        top_p=np.ones(64, dtype=np.float32),
        top_k=np.zeros(64, dtype=np.int64),
        uniform=uniform,
    )
    sampled = sample_on_device(logits, torch.from_numpy(temperature), torch.from_numpy(uniform))
    assert torch.equal(sampled[0], expected[0])
    torch.testing.assert_close(sampled[1], expected[1])


@pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)
def test_an_engine_keeps_its_graphs_over_an_update_and_makes_new_ones_after_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_graphs: list[Graphs] = []

    def make_graphs() -> Graphs:
        all_graphs.append(Graphs())
        return all_graphs[-1]

    def make_captured_steps(decoder: Any, cache: Any) -> GpuSteps:
        return GpuSteps(decoder, cache, capture=make_graphs().capture)

    monkeypatch.setattr(batching, "GpuSteps", make_captured_steps)
    architecture = parse_architecture(make_qwen2(0).config.to_dict(), "a test's")
    engine = EmbeddedEngine(GpuDecoder(architecture, 32), rows=3)
    prompt = [5, 6]
    for version, sleeps in ((1, False), (2, True), (3, False)):
        model = make_qwen2(version)
        engine.load_weights(model.state_dict().items(), version)
        # With the second request, rows are sampled from the logits of the graph.
        engine.submit(0, prompt, Sampling(max_tokens=3, seed=version))
        engine.submit(1, prompt, Sampling(max_tokens=2, seed=version, top_p=0.9))
        for completion in drain(engine).values():
            assert largest_logprob_error(model, prompt, completion) < LOGPROB_TOLERANCE
            assert completion.versions[0].version == version
        if sleeps:
            engine.sleep()
            engine.wake()
    assert [graphs.sizes for graphs in all_graphs] == [[2, 1], [2, 1]]
    assert [graphs.replays for graphs in all_graphs] == [4, 2]
