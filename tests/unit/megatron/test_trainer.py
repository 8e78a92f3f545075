"""Scores, the frozen reference, critics, entropies and skipped steps of a trainer, on one rank and on two."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mcore_mas.credit.samples import Sample
from mcore_mas.packing.pack import pack, unpack
from tests.support import precision, ranks, reference

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
# Layouts in which steps are skipped
SPIKE_LAYOUTS = ("tp2", "pp2", "dp2")
SLEEP_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True, "bf16": True},
}

# Layouts, by family, in which the weight of the head is gathered separately: it has a bucket of its
# own because it is large, or it is the last pipeline stage's copy of the embedding.
LATE_GATHERING_LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3": {"dp": 2, "bucket": 1000},
    "qwen2": {"pp": 2, "dp": 2},
}

# Vocabulary of a large model of one layer: glibc gives freed memory of more than 32 MiB back.
LARGE_VOCAB = 150_000


def entropy_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "hidden": torch.randn(7, 16, generator=generator),
        "weight": torch.randn(101, 16, generator=generator),
        "labels": torch.randint(0, 101, (7,), generator=generator),
        "temperatures": torch.linspace(0.5, 1.5, 7),
    }


def mask_inputs() -> dict[str, Tensor]:
    """Return a mask for each row of `entropy_inputs`, which allows the row's label.

    With two ranks, the second mask allows tokens of both, the third only the label, and the fourth
    only tokens of the second rank.
    """
    labels = entropy_inputs()["labels"]
    mask_rows = torch.tensor([0, 1, 2, 3, 1, 0, 3])
    is_allowed = torch.zeros(4, 128, dtype=torch.bool)
    is_allowed[0] = True
    is_allowed[1, 5:90:7] = True
    is_allowed[3, 60:80] = True
    labels[mask_rows == 3] = torch.tensor([60, 79])
    for row, mask in enumerate(mask_rows):
        is_allowed[mask, labels[row]] = True
    masks = np.packbits(is_allowed.numpy(), axis=1, bitorder="little")
    return {"labels": labels, "masks": torch.from_numpy(masks), "mask_rows": mask_rows}


def plain_entropy(dtype: torch.dtype, masked: bool) -> dict[str, Tensor]:
    """Compute the results of `ranks.differentiate_entropy` in plain torch: both values and both gradients."""
    inputs = entropy_inputs()
    if masked:
        inputs |= mask_inputs()
    hidden = inputs["hidden"].to(dtype).requires_grad_()
    weight = inputs["weight"].to(dtype).requires_grad_()
    logits = hidden @ weight.t() / inputs["temperatures"][:, None]
    if masked:
        bits = np.unpackbits(inputs["masks"].numpy(), axis=1, count=101, bitorder="little")
        is_allowed = torch.from_numpy(bits).bool()[inputs["mask_rows"]]
        logits = logits.masked_fill(~is_allowed, -1e30)
    all_logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    logprobs = all_logprobs.gather(1, inputs["labels"][:, None])[:, 0]
    (torch.arange(1.0, 8.0) * (logprobs + 2 * entropy)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def make_job(function: Callable[..., None], layout: dict[str, Any], **arguments: Any) -> ranks.Job:
    sizes = {name: layout[name] for name in ("tp", "pp", "cp", "dp") if name in layout}
    return ranks.Job(function=function, arguments=arguments, **sizes)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all jobs; return a folder with a subfolder of results for each job and layout."""
    folder = tmp_path_factory.mktemp("results")
    policy = folder / "policy"
    critic = folder / "critic"
    large = folder / "large"
    reference.make_model("qwen2", policy)
    reference.make_model("qwen2", critic, critic=True)
    reference.make_model("qwen2", large, layers=1, vocab_size=LARGE_VOCAB)
    samples = reference.make_samples()
    critic_samples = reference.make_critic_samples()

    def out(name: str) -> Path:
        subfolder = folder / name
        subfolder.mkdir()
        return subfolder

    jobs = []
    for name, layout in LAYOUTS.items():
        spec = ranks.make_spec(str(policy), **layout)
        functions = [ranks.score]
        if name in SPIKE_LAYOUTS:
            functions.append(ranks.train_with_spikes)
        for function in functions:
            job_out = out(f"{function.__name__}_{name}")
            jobs.append(make_job(function, layout, spec=spec, samples=samples, out=job_out))
    for name in ("one", "tp2"):
        layout = LAYOUTS[name]
        for masks in ({}, mask_inputs()):
            job_out = out(f"{'masked' if masks else 'entropy'}_{name}")
            inputs = entropy_inputs() | masks
            jobs.append(make_job(ranks.differentiate_entropy, layout, out=job_out, **inputs))
        jobs.append(
            make_job(
                ranks.train_critic,
                layout,
                spec=ranks.make_spec(str(critic), **layout),
                policy=str(policy),
                samples=critic_samples,
                steps=STEPS,
                out=out(f"critic_{name}"),
            )
        )
    for name in ("one", "cp2"):
        spec = ranks.make_spec(str(policy), **LAYOUTS[name])
        job_out = out(f"sequence_level_{name}")
        jobs.append(
            make_job(
                ranks.train_sequence_loss, LAYOUTS[name], spec=spec, samples=samples, out=job_out
            )
        )
    for family, layout in LATE_GATHERING_LAYOUTS.items():
        reference.make_model(family, folder / family)
        spec = ranks.make_spec(
            str(folder / family), distributed_optimizer=True, overlap=True, **layout
        )
        job_out = out(f"late_{family}")
        jobs.append(
            make_job(ranks.find_pending_gathers, layout, spec=spec, samples=samples, out=job_out)
        )
    for name, layout in SLEEP_LAYOUTS.items():
        spec = ranks.make_spec(str(large), **layout)
        jobs.append(
            make_job(
                ranks.train_with_sleep, layout, spec=spec, samples=samples, out=out(f"sleep_{name}")
            )
        )
    ranks.run_jobs(jobs)
    return folder


def load(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(path, weights_only=True)
    return result


def by_token(scores: Sequence[Tensor], samples: list[Sample]) -> list[Tensor]:
    """Return the scores of each sample's completion."""
    return [torch.tensor(row) for row in unpack(pack(samples, 12), scores, samples)]


@pytest.mark.parametrize("chunks", ["whole", "chunks"])
@pytest.mark.parametrize("layout", ["one", "tp2"])
@pytest.mark.parametrize("kind", ["entropy", "masked"])
def test_entropy_and_its_gradient_are_those_of_plain_torch(
    results: Path, kind: str, layout: str, chunks: str
) -> None:
    plain = plain_entropy(torch.float32, kind == "masked")
    exact = plain_entropy(torch.float64, kind == "masked")
    files = sorted((results / f"{kind}_{layout}").glob(f"{chunks}_*.pt"))
    by_rank = [load(file) for file in files]
    for result in by_rank:
        for name in ("logprobs", "entropy", "hidden"):  # complete on every rank
            precision.assert_close(result[name], plain[name], exact[name])
    # Each rank has the gradient of its own rows. Rows that pad the vocabulary have none.
    weight_gradient = torch.cat([result["weight"] for result in by_rank])
    precision.assert_close(weight_gradient[:101], plain["weight"], exact["weight"])
    assert not weight_gradient[101:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_log_probabilities_of_hugging_face(
    results: Path, layout: str, tmp_path: Path
) -> None:
    model = reference.make_model("qwen2", tmp_path)
    samples = reference.make_samples()
    scores = load(results / f"score_{layout}" / "rank0.pt")["scores"]
    assert all(score.dtype == torch.float32 for score in scores["start"])
    precision.assert_scores(by_token(scores["start"], samples), model, samples)

    train = partial(reference.train, samples=samples, steps=1, lr=ranks.LR)
    trained_scores = by_token(scores["trained"], samples)
    precision.assert_scores(trained_scores, model, samples, train=train)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_model_at_the_start(results: Path, layout: str) -> None:
    result = load(results / f"score_{layout}" / "rank0.pt")
    scores = result["scores"]
    for kind in ("reference", "restored_reference"):
        assert all(map(torch.equal, scores[kind], scores["start"])), kind
    assert all(map(torch.equal, scores["restored"], scores["trained"]))
    assert not any(map(torch.equal, scores["trained"], scores["start"]))
    # Weights before and after the reference has scored.
    for name, tensor in result["before"].items():
        assert torch.equal(result["after"][name], tensor), name


@pytest.mark.parametrize("family", LATE_GATHERING_LAYOUTS)
def test_no_gathering_is_pending_after_an_update(results: Path, family: str) -> None:
    layout = LATE_GATHERING_LAYOUTS[family]
    files = sorted((results / f"late_{family}").glob("rank*.json"))
    pending = [json.loads(file.read_text()) for file in files]
    assert pending == [[]] * (layout["dp"] * layout.get("pp", 1))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "dp2"])
def test_scores_are_the_same_on_every_rank(results: Path, layout: str) -> None:
    first = load(results / f"score_{layout}" / "rank0.pt")["scores"]
    second = load(results / f"score_{layout}" / "rank1.pt")["scores"]
    for kind, scores in first.items():
        assert all(map(torch.equal, scores, second[kind])), kind


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_a_critic_trains_like_a_linear_head_in_hugging_face(
    results: Path, layout: str, tmp_path: Path
) -> None:
    critic = reference.make_model("qwen2", tmp_path, critic=True)
    samples = reference.make_critic_samples()
    expected = precision.expect(critic, samples, STEPS, ranks.LR, reference.value_loss_of)
    folder = results / f"critic_{layout}"
    precision.compare(folder, expected)
    scores = by_token(load(folder / "rank0.pt")["scores"], samples)
    precision.assert_scores(scores, critic, samples, reference.values_of)


def test_a_critic_on_a_policy_starts_with_a_small_random_head(results: Path) -> None:
    names = ("critic_one/rank0.pt", "critic_tp2/rank0.pt", "critic_tp2/rank1.pt")
    heads = [load(results / name)["fresh"]["score.weight"] for name in names]
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert heads[0].shape == (1, 64)
    assert 0.5 < float(heads[0].std()) * 65 < 1.5  # the standard deviation is 1 / (hidden + 1)

    weights = load(results / "critic_tp2" / "rank0.pt")["fresh"]
    policy = transformers.AutoModelForCausalLM.from_pretrained(results / "policy").state_dict()
    assert torch.equal(weights["model.norm.weight"], policy["model.norm.weight"])
    assert "lm_head.weight" not in weights


def test_an_exported_critic_is_a_model_for_sequence_classification(results: Path) -> None:
    folder = results / "critic_tp2"
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "exported", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    head = load(folder / "rank0.pt")["fresh"]["score.weight"]
    assert torch.equal(model.score.weight, head)


def assert_equal_tensors(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    """Assert that two nested dictionaries have equal tensors."""
    for name, value in one.items():
        if isinstance(value, dict):
            assert_equal_tensors(value, other[name])
        else:
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("layout", SPIKE_LAYOUTS)
def test_a_skipped_step_touches_nothing_on_any_rank(results: Path, layout: str) -> None:
    """Two of nine steps have a gradient of agent a that is not finite, or a spike."""
    skipped_steps = (6, 7)
    for path in (results / f"train_with_spikes_{layout}").iterdir():
        history = load(path)
        for step, metrics in enumerate(history["metrics"]):
            skipped = 1.0 if step in skipped_steps else 0.0
            assert metrics["skipped_updates"] == skipped
            assert metrics["grad_spikes"] == skipped
            assert metrics["agent/a/grad_spikes"] == skipped
            assert metrics["agent/b/grad_spikes"] == 0.0
        assert len(history["metrics"]) == 9

        assert history["moments"][5]
        for step in skipped_steps:
            assert_equal_tensors(history["weights"][step], history["weights"][5])
            assert_equal_tensors(history["moments"][step], history["moments"][5])
        before = history["weights"][5]["model.norm.weight"]
        assert not torch.equal(history["weights"][8]["model.norm.weight"], before)


def test_a_reply_that_is_split_over_ranks_has_one_ratio(results: Path, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path)
    expected = precision.expect(model, reference.make_samples(), 2, ranks.LR)
    bound = precision.bound(expected.float32.parameters)
    one_rank = load(results / "sequence_level_one" / "0.pt")
    for rank in (0, 1):
        split = load(results / "sequence_level_cp2" / f"{rank}.pt")
        for metrics, one_rank_metrics in zip(split["metrics"], one_rank["metrics"], strict=True):
            assert metrics == pytest.approx(one_rank_metrics, rel=1e-5, abs=1e-7)
        assert precision.gap(split["weights"], one_rank["weights"]) <= bound


def test_spike_monitors_are_saved(results: Path) -> None:
    record = json.loads((results / "score_one" / "checkpoint" / "trainer.json").read_text())
    assert set(record["spikes"]) == {"", "a", "b"}
    assert len(record["spikes"]["a"]["norms"]) == 1


@pytest.mark.parametrize("layout", SLEEP_LAYOUTS)
def test_updates_after_a_sleep_have_the_same_bits(results: Path, layout: str) -> None:
    for path in (results / f"sleep_{layout}").iterdir():
        result = load(path)
        with_sleep = result["with_sleep"]
        without_sleep = result["without_sleep"]
        assert with_sleep["metrics"] == without_sleep["metrics"]
        assert all(map(torch.equal, with_sleep["scores"], without_sleep["scores"]))
        assert_equal_tensors(with_sleep["weights"], without_sleep["weights"])


def test_a_sleep_returns_memory_to_the_system(results: Path) -> None:
    embedding = LARGE_VOCAB * 64
    norms = 3 * 64
    queries = 64 * 64 + 64
    keys_and_values = 2 * (64 * 32 + 32)
    output = 64 * 64
    mlp = 3 * 64 * 96
    count = embedding + norms + queries + keys_and_values + output + mlp
    result = load(results / "sleep_one" / "0.pt")
    assert result["parameters"] == count
    gradient_bytes = 4 * count  # float32
    assert result["with_sleep"]["freed"] == [gradient_bytes] * 3
    assert all(change < -0.9 * gradient_bytes for change in result["with_sleep"]["resident"])
