"""Training on replies that a grammar constrained: log-probabilities and updates over the allowed tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.models.grammars import Grammars, ReplyConstraint, unpack_masks
from rollout.records.trajectory import Sampling
from tests.support import precision, ranks
from tests.support.embedded import drain
from tests.support.gateway import tiny_model
from tests.support.templates import renderer_of

VOCAB = 259  # two tensor-parallel ranks have 130 columns each, one of them for padding
PROMPT = tuple(b"What is 3 + 4?")
SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["value"],
}


def sample_replies(folder: Path, deterministic: bool = False) -> list[Sample]:
    """Sample six constrained replies, and one without a constraint, of an untrained model."""
    renderer = renderer_of("qwen2.5", folder)
    tiny_model(folder, 256)
    grammar = renderer.grammar(ReplyConstraint.of(SCHEMA, ()), PROMPT)
    engine = EmbeddedEngine.from_folder(folder, max_length=256, deterministic=deterministic)
    grammars = [grammar] * 6 + [""]
    for number, name in enumerate(grammars):
        sampling = Sampling(max_tokens=40, stop=renderer.stop, seed=number, grammar=name)
        engine.submit(number, PROMPT, sampling)
    completions = drain(engine)
    return [
        Sample(
            policy="p",
            agent="ab"[number % 2],
            task="t",
            trajectory=str(number),
            turn=0,
            prompt_ids=PROMPT,
            completion_ids=completions[number].token_ids,
            behaviour=completions[number].logprobs,
            grammar=name,
        )
        for number, name in enumerate(grammars)
    ]


def allowed_tokens(folder: Path, sample: Sample) -> np.ndarray:
    """Return the tokens [C, V] that a sample's grammar allows at each of its tokens."""
    if not sample.grammar:
        return np.ones((len(sample.completion_ids), VOCAB), dtype=bool)
    masks = Grammars(folder).masks(sample.grammar, sample.completion_ids)
    return unpack_masks(np.stack(masks), VOCAB)


def masked_logprobs(model: Any, sample: Sample, *, folder: Path) -> torch.Tensor:
    """Return the log-probabilities [C] of a completion in plain torch."""
    token_ids = torch.tensor(sample.completion_ids)
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    is_allowed = torch.from_numpy(allowed_tokens(folder, sample))
    logprobs = logits.masked_fill(~is_allowed, -torch.inf).log_softmax(-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0]


def masked_loss(model: Any, sample: Sample, *, folder: Path) -> torch.Tensor:
    weight = torch.tensor(sample.weight)
    return -(weight * masked_logprobs(model, sample, folder=folder)).sum()


def scores_of(folder: Path, samples: list[Sample], **spec: Any) -> list[torch.Tensor]:
    trainer = MegatronTrainer(TrainerSpec(model=str(folder), **spec))
    batches = pack(samples, 256, grammars=Grammars(folder))
    return [torch.tensor(row) for row in unpack(batches, trainer.score(batches), samples)]


def test_engine_and_trainer_have_the_same_logprobs(tmp_path: Path, one_rank: None) -> None:
    samples = sample_replies(tmp_path)
    scores = scores_of(tmp_path, samples)
    model = tiny_model(tmp_path, 256)
    score = partial(masked_logprobs, folder=tmp_path)
    precision.assert_scores(scores, model, samples, score)
    engine_logprobs = [torch.tensor(sample.behaviour) for sample in samples]
    precision.assert_scores(engine_logprobs, model, samples, score)

    for sample, row in zip(samples[:6], scores, strict=False):
        is_forced = torch.from_numpy(allowed_tokens(tmp_path, sample).sum(1) == 1)
        assert 10 < is_forced.sum() < len(row)
        assert (row[is_forced] == 0).all()


def test_engine_and_trainer_agree_to_the_bit_in_deterministic_mode(
    tmp_path: Path, one_rank: None
) -> None:
    samples = sample_replies(tmp_path, deterministic=True)
    scores = scores_of(tmp_path, samples, deterministic=True)
    assert [tuple(row.tolist()) for row in scores] == [sample.behaviour for sample in samples]


@pytest.mark.multirank
@pytest.mark.slow
def test_scores_and_updates_are_those_of_plain_torch_on_one_rank_and_two(tmp_path: Path) -> None:
    samples = sample_replies(tmp_path)
    samples = [replace(sample, weight=1 / (1 + n)) for n, sample in enumerate(samples)]
    jobs = []
    for tp in (1, 2):
        out = tmp_path / str(tp)
        out.mkdir()
        spec = ranks.make_spec(str(tmp_path), tp=tp)
        arguments = {"spec": spec, "samples": samples, "out": out}
        jobs.append(ranks.Job(function=ranks.train_constrained, arguments=arguments, tp=tp))
    ranks.run_jobs(jobs)

    model = tiny_model(tmp_path, 256)
    loss = partial(masked_loss, folder=tmp_path)
    expected = precision.expect(model, samples, 1, ranks.LR, loss)
    for job in jobs:
        for rank in range(job.tp):
            result = torch.load(job.arguments["out"] / f"rank{rank}.pt", weights_only=True)
            score = partial(masked_logprobs, folder=tmp_path)
            precision.assert_scores(result["scores"], model, samples, score)
            error = precision.gap(result["weights"], expected.steps[0]["parameters"])
            assert error <= precision.bound(expected.float32.parameters)


def test_masks_are_stored_once_and_follow_their_rows(tmp_path: Path) -> None:
    samples = sample_replies(tmp_path)
    batches = pack(samples, 4096, grammars=Grammars(tmp_path))
    by_agent = {batch.agent: batch for batch in batches}
    for agent, batch in by_agent.items():
        assert batch.masks is not None
        assert batch.mask_rows is not None
        members = [sample for sample in samples if sample.agent == agent]
        expected = np.concatenate([allowed_tokens(tmp_path, member) for member in members])
        different = np.unique(expected[: -1 if agent == "a" else None], axis=0)
        assert len(batch.masks) <= len(different) + 1
        masks = unpack_masks(batch.masks.numpy(), VOCAB)
        order = np.argsort(batch.sequences.numpy(), kind="stable")
        assert (masks[batch.mask_rows.numpy()][order] == expected).all()

        selected = batch.select(batch.sequences == int(batch.sequences[0]))
        assert selected.masks is batch.masks
        assert len(selected.mask_rows) == len(selected.labels)  # type: ignore[arg-type]
        assert batch.idle().mask_rows.tolist() == [0]  # type: ignore[union-attr]
        assert masks[0].all()


def test_a_sample_whose_grammar_forbids_its_tokens_is_named(tmp_path: Path) -> None:
    sample = sample_replies(tmp_path)[0]
    other = replace(sample, completion_ids=(*sample.completion_ids[:3], 0))
    with pytest.raises(ValueError, match=r"trajectory 0, turn 0 \(a\): token 3 of the reply, 0,"):
        pack([other], 4096, grammars=Grammars(tmp_path))
    with pytest.raises(ValueError, match="pack needs the model's grammars"):
        pack([sample], 4096)
