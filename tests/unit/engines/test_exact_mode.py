"""Deterministic mode: log-probabilities of engine and trainer are equal to the bit, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.models.batch_invariant import (
    KEY_MULTIPLE,
    MAX_TERMS,
    MIN_ROWS,
    products_are_batch_invariant,
    row_attention,
    row_product,
)
from rollout.records.trajectory import Sampling
from tests.support.embedded import drain
from tests.support.gradients import full_gradients
from tests.support.reference import make_model

LENGTH = 2 * MAX_TERMS + 100  # attention sums over more than one product
# (inputs, outputs) of products
PRODUCT_SIZES = ((48, 101), (64, 96), (130, 256), (900, 384))
GAP = "agent/a/logprob_gap_max"

needs_exact_products = pytest.mark.skipif(
    not products_are_batch_invariant(
        torch.ones(outputs, inputs) / 7 for inputs, outputs in PRODUCT_SIZES
    ),
    reason="on this CPU the bits of a row depend on other rows; engines decode each sequence alone",
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Initialize the process groups of one rank."""
    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


def make_trainer(folder: Path, *, lr: float = 0.0, deterministic: bool = True) -> MegatronTrainer:
    return MegatronTrainer(
        TrainerSpec(model=str(folder), lr=lr, objective=Objective(), deterministic=deterministic)
    )


def sample(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Sample]:
    """Return the replies of an engine in deterministic mode, at two temperatures."""
    engine = EmbeddedEngine.from_folder(folder, max_length=LENGTH, deterministic=True, **settings)
    assert engine.decoder.exact
    temperatures = [1.0 if number % 2 else 0.7 for number in range(len(prompts))]
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=8 + number, seed=number, temperature=temperatures[number])
        engine.submit(number, prompt, sampling)
    completions = drain(engine)
    return [
        Sample(
            policy="p",
            agent="a",
            task="t",
            trajectory=str(number),
            turn=0,
            prompt_ids=tuple(prompt),
            completion_ids=completions[number].token_ids,
            behaviour=completions[number].logprobs,
            temperature=temperatures[number],
            advantages=(1.0,) * len(completions[number].token_ids),
            weight=0.1,
        )
        for number, prompt in enumerate(prompts)
    ]


def make_prompts() -> list[list[int]]:
    """Return prompts of many lengths.

    Some have a common prefix, and two are longer than the number of terms that one product sums.
    """
    ids = torch.randint(1, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = (1, 3, 15, 16, 17, 40, 130, MAX_TERMS - 3, MAX_TERMS + 20, 2 * MAX_TERMS + 5)
    prompts = [ids[:size] for size in sizes]
    prompts += [[*ids[:17], *ids[60 : 60 + size]] for size in (1, 20, 90)]
    return prompts


@needs_exact_products
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_trainer_and_engine_agree_to_the_bit(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    trainer = make_trainer(tmp_path)
    samples = sample(tmp_path, make_prompts())
    engine_logprobs = [reply.behaviour for reply in samples]
    for share in (False, True):
        batches = pack(samples, 900, share=share)
        assert unpack(batches, trainer.score(batches), samples) == engine_logprobs
    assert trainer.update(pack(samples, 900))[GAP] == 0.0


@needs_exact_products
def test_the_gap_of_later_updates_in_a_step_uses_the_scores_before_the_step(
    tmp_path: Path,
) -> None:
    make_model("qwen2", tmp_path)
    trainer = make_trainer(tmp_path, lr=0.01)
    batches = pack(sample(tmp_path, make_prompts()[:4]), 900)
    scored = [
        replace(batch, proximal=row)
        for batch, row in zip(batches, trainer.score(batches), strict=True)
    ]
    assert trainer.update(batches)[GAP] == 0.0
    assert trainer.update(scored)[GAP] == 0.0
    # Without `proximal`, the present weights compute the scores, and two updates have changed them.
    assert trainer.update(batches)[GAP] > 1e-3


@needs_exact_products
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_replies_do_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    batched = sample(tmp_path, make_prompts())
    two_rows = sample(tmp_path, make_prompts(), rows=2, reuse_prefixes=False)
    assert [reply.completion_ids for reply in two_rows] == [
        reply.completion_ids for reply in batched
    ]
    assert [reply.behaviour for reply in two_rows] == [reply.behaviour for reply in batched]


@needs_exact_products
def test_gradients_agree_with_the_default_mode(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    norms = []
    gradients = []
    for deterministic in (False, True):
        trainer = make_trainer(tmp_path, deterministic=deterministic)
        metrics = trainer.update(pack(sample(tmp_path, make_prompts()), 900))
        norms.append(metrics["grad_norm"])
        gradients.append(dict(full_gradients(trainer)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[0] > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@needs_exact_products
@pytest.mark.parametrize(("inputs", "outputs"), PRODUCT_SIZES)
def test_a_row_of_a_product_does_not_depend_on_other_rows(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(100, inputs, generator=generator)
    product = row_product(x, weight)
    for first, size in ((0, 1), (3, 2), (5, MIN_ROWS), (7, 60)):
        rows = slice(first, first + size)
        assert torch.equal(row_product(x[rows], weight), product[rows])
    assert torch.allclose(product, x @ weight.t(), atol=1e-3)
    assert products_are_batch_invariant([weight])


@needs_exact_products
def test_a_row_of_attention_does_not_depend_on_other_rows_or_masked_keys() -> None:
    torch.manual_seed(0)
    q = torch.randn(4, 3, 32)
    keys = torch.randn(4, 32, 2 * MAX_TERMS)
    values = torch.randn(4, 2 * MAX_TERMS, 32)
    visible = MAX_TERMS + KEY_MULTIPLE - 1
    mask = torch.where(torch.arange(2 * MAX_TERMS) < visible, 0.0, -torch.inf)[None, None]
    attention = row_attention(q, keys, values, mask)

    first_keys = slice(0, MAX_TERMS + KEY_MULTIPLE)
    one_row = row_attention(
        q[:, :1], keys[..., first_keys], values[:, first_keys], mask[..., first_keys]
    )
    assert torch.equal(one_row, attention[:, :1])
    expected = torch.softmax(q @ keys[..., :visible], -1) @ values[:, :visible]
    assert torch.allclose(attention, expected, atol=1e-5)


def test_sequences_are_decoded_alone_where_products_are_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path)
    monkeypatch.setattr(
        "rollout.engines.embedded.exact_decoder.products_are_batch_invariant", lambda weights: False
    )
    replies = []
    for rows in (1, 8):
        engine = EmbeddedEngine.from_folder(tmp_path, max_length=64, deterministic=True, rows=rows)
        assert not engine.decoder.exact
        for number in range(4):
            engine.submit(number, [5, 7, number + 1], Sampling(max_tokens=12, seed=number))
        completions = drain(engine)
        replies.append([completions[number].logprobs for number in range(4)])
    assert replies[0] == replies[1]
