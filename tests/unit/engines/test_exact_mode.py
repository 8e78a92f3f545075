"""The deterministic mode: engine and trainer say the same to the bit, whatever is computed beside it."""

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
from rollout.models.exact import (
    KEY_MULTIPLE,
    MAX_TERMS,
    MIN_ROWS,
    products_are_exact,
    row_attention,
    row_product,
)
from rollout.records.trajectory import Sampling
from tests.support.embedded import drain
from tests.support.gradients import full_gradients
from tests.support.reference import make_model

LENGTH = 2 * MAX_TERMS + 100  # so that attention sums over more than one product
exact_here = pytest.mark.skipif(
    not products_are_exact(
        torch.ones(outputs, inputs) / 7 for inputs, outputs in ((48, 101), (64, 96), (900, 384))
    ),
    reason="this CPU's products give a row other bits beside other rows; engines compute sequences alone here",
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


def said(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Sample]:
    """What an engine samples after some prompts, at two temperatures."""
    engine = EmbeddedEngine.from_folder(folder, max_length=LENGTH, deterministic=True, **settings)
    assert engine.decoder.exact
    for n, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=8 + n, seed=n, temperature=1.0 if n % 2 else 0.7)
        engine.submit(n, prompt, sampling)
    completions = drain(engine)
    return [
        Sample(
            policy="p",
            agent="a",
            task="t",
            trajectory=str(n),
            turn=0,
            prompt_ids=tuple(prompt),
            completion_ids=completions[n].token_ids,
            behaviour=completions[n].logprobs,
            temperature=1.0 if n % 2 else 0.7,
            advantages=(1.0,) * len(completions[n].token_ids),
            weight=0.1,
        )
        for n, prompt in enumerate(prompts)
    ]


def prompts() -> list[list[int]]:
    """Of all lengths; some begin alike, and two are longer than one product sums."""
    ids = torch.randint(1, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = (1, 3, 15, 16, 17, 40, 130, MAX_TERMS - 3, MAX_TERMS + 20, 2 * MAX_TERMS + 5)
    return [ids[:size] for size in sizes] + [
        [*ids[:17], *ids[60 : 60 + size]] for size in (1, 20, 90)
    ]


@exact_here
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_trainer_and_engine_agree_to_the_bit(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    trainer = MegatronTrainer(
        TrainerSpec(model=str(tmp_path), lr=0.0, objective=Objective(), deterministic=True)
    )
    samples = said(tmp_path, prompts())
    together = [s.behaviour for s in samples]
    for share in (False, True):
        batches = pack(samples, 900, share=share)
        assert unpack(batches, trainer.score(batches), samples) == together
    assert trainer.update(pack(samples, 900))["agent/a/logprob_gap_max"] == 0.0


@exact_here
def test_a_later_update_of_a_step_is_held_against_the_engine_by_the_scores_before_it(
    tmp_path: Path,
) -> None:
    make_model("qwen2", tmp_path)
    trainer = MegatronTrainer(
        TrainerSpec(model=str(tmp_path), lr=0.01, objective=Objective(), deterministic=True)
    )
    batches = pack(said(tmp_path, prompts()[:4]), 900)
    scored = [
        replace(batch, proximal=row)
        for batch, row in zip(batches, trainer.score(batches), strict=True)
    ]
    assert trainer.update(batches)["agent/a/logprob_gap_max"] == 0.0
    assert trainer.update(scored)["agent/a/logprob_gap_max"] == 0.0
    assert (
        trainer.update(batches)["agent/a/logprob_gap_max"] > 1e-3
    )  # by weights that two updates have changed


@exact_here
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_said_does_not_depend_on_what_else_is(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    batched = said(tmp_path, prompts())
    narrow = said(tmp_path, prompts(), rows=2, reuse_prefixes=False)
    assert [(s.completion_ids, s.behaviour) for s in narrow] == [
        (s.completion_ids, s.behaviour) for s in batched
    ]


@exact_here
def test_gradients_are_those_of_the_other_mode(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    found = []
    for deterministic in (False, True):
        spec = TrainerSpec(
            model=str(tmp_path), lr=0.0, objective=Objective(), deterministic=deterministic
        )
        trainer = MegatronTrainer(spec)
        metrics = trainer.update(pack(said(tmp_path, prompts()), 900))
        found.append((metrics["grad_norm"], dict(full_gradients(trainer))))
    (norm, plain), (exact_norm, exact) = found
    assert exact_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0
    for name, gradient in plain.items():
        torch.testing.assert_close(exact[name], gradient, rtol=1e-4, atol=1e-6)


@exact_here
def test_a_row_of_a_product_or_of_attention_is_the_same_among_any_others() -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((48, 101), (64, 96), (130, 256), (900, 384)):
        weight, x = torch.randn(outputs, inputs), torch.randn(100, inputs)
        whole = row_product(x, weight)
        for first, size in ((0, 1), (3, 2), (5, MIN_ROWS), (7, 60)):
            assert torch.equal(
                row_product(x[first : first + size], weight), whole[first : first + size]
            )
        assert torch.allclose(whole, x @ weight.t(), atol=1e-3)
        assert products_are_exact([weight])
    q, keys, values = (
        torch.randn(4, 3, 32),
        torch.randn(4, 32, 2 * MAX_TERMS),
        torch.randn(4, 2 * MAX_TERMS, 32),
    )
    seen = MAX_TERMS + KEY_MULTIPLE - 1
    mask = torch.where(torch.arange(2 * MAX_TERMS) < seen, 0.0, -torch.inf)[None, None]
    out = row_attention(q, keys, values, mask)
    near = slice(0, MAX_TERMS + KEY_MULTIPLE)
    assert torch.equal(
        row_attention(q[:, :1], keys[..., near], values[:, near], mask[..., near]), out[:, :1]
    )
    right = torch.softmax(q @ keys[..., :seen], -1) @ values[:, :seen]
    assert torch.allclose(out, right, atol=1e-5)


def test_where_products_are_not_exact_each_sequence_is_computed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path)
    monkeypatch.setattr(
        "rollout.engines.embedded.exact_decoder.products_are_exact", lambda weights: False
    )
    engines = [
        EmbeddedEngine.from_folder(tmp_path, max_length=64, deterministic=True, rows=rows)
        for rows in (1, 8)
    ]
    replies = []
    for engine in engines:
        assert not engine.decoder.exact
        for n in range(4):
            engine.submit(n, [5, 7, n + 1], Sampling(max_tokens=12, seed=n))
        replies.append(drain(engine))
    assert [replies[0][n].logprobs for n in range(4)] == [replies[1][n].logprobs for n in range(4)]
