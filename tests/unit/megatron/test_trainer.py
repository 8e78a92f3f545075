"""Scores, the frozen reference, critics, differentiable entropy and skipped steps, on one rank and on two."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from mcore_mas.credit.samples import Sample
from mcore_mas.packing.pack import pack, unpack
from tests.support import precision, ranks, reference

STEPS = 3
LAYOUTS = {  # by name
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
REST = {
    "one": {},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True, "bf16": True},
}  # by name
# a head whose weight is in a bucket of its own: one that is large, and a copy of the embedding on the last stage
LATE = {"qwen3": {"dp": 2, "bucket": 1000}, "qwen2": {"pp": 2, "dp": 2}}  # by model
pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def entropy_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "hidden": torch.randn(7, 16, generator=generator),
        "weight": torch.randn(101, 16, generator=generator),
        "labels": torch.randint(0, 101, (7,), generator=generator),
        "temperatures": torch.linspace(0.5, 1.5, 7),
    }


def plain_entropy(dtype: torch.dtype) -> dict[str, Tensor]:
    """What `ranks.differentiate_entropy` computes, in plain torch: both values and both gradients."""
    given = entropy_inputs()
    hidden, weight = (given[name].to(dtype).requires_grad_() for name in ("hidden", "weight"))
    logp = torch.log_softmax(hidden @ weight.t() / given["temperatures"][:, None], dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    logprobs = logp.gather(1, given["labels"][:, None])[:, 0]
    (torch.arange(1.0, 8.0) * (logprobs + 2 * entropy)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    values = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return {**values, "hidden": hidden.grad, "weight": weight.grad}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every job wrote, by job and layout."""
    folder = tmp_path_factory.mktemp("runs")
    policy, critic = str(folder / "policy"), str(folder / "critic")
    reference.make_model("qwen2", Path(policy))
    reference.make_model("qwen2", Path(critic), critic=True)
    samples, valued = reference.make_samples(), reference.make_critic_samples()
    jobs = []

    def job(function: Callable[..., None], name: str, **arguments: object) -> None:
        out = folder / f"{function.__name__}_{name}"
        out.mkdir()
        sizes = {
            size: LAYOUTS[name][size] for size in ("tp", "pp", "cp", "dp") if size in LAYOUTS[name]
        }
        jobs.append(ranks.Job(function=function, arguments={"out": out, **arguments}, **sizes))

    for name, layout in LAYOUTS.items():
        job(ranks.score, name, spec=ranks.make_spec(policy, **layout), samples=samples)
        job(ranks.train_with_spikes, name, spec=ranks.make_spec(policy, **layout), samples=samples)
    for name in ("one", "tp2"):
        job(ranks.differentiate_entropy, name, **entropy_inputs())
        spec = ranks.make_spec(critic, **LAYOUTS[name])
        job(ranks.train_critic, name, spec=spec, policy=policy, samples=valued, steps=STEPS)
    for name in ("one", "cp2"):
        job(
            ranks.train_sequence_loss,
            name,
            spec=ranks.make_spec(policy, **LAYOUTS[name]),
            samples=samples,
        )
    for family, layout in LATE.items():
        reference.make_model(family, folder / family)
        out = folder / f"late_{family}"
        out.mkdir()
        spec = ranks.make_spec(
            str(folder / family), distributed_optimizer=True, overlap=True, **layout
        )
        arguments = {"spec": spec, "out": out, "samples": samples}
        jobs.append(
            ranks.Job(
                function=ranks.find_pending_gathers,
                arguments=arguments,
                dp=2,
                pp=layout.get("pp", 1),
            )
        )
    large = (
        folder / "large"
    )  # more than the 32 MiB from which the system gets freed memory back in any case
    reference.make_model("qwen2", large, layers=1, vocab_size=150_000)
    for name, layout in REST.items():
        job(
            ranks.train_with_sleep,
            name,
            spec=ranks.make_spec(str(large), **layout),
            samples=samples,
        )
    ranks.run_jobs(jobs)
    return folder


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def by_token(scores: Sequence[Tensor], samples: list[Sample]) -> list[Tensor]:
    return [torch.tensor(row) for row in unpack(pack(samples, 12), scores, samples)]


@pytest.mark.parametrize("chunks", ["whole", "chunks"])
@pytest.mark.parametrize("name", ["one", "tp2"])
def test_entropy_and_its_gradient_are_those_of_plain_torch(
    runs: Path, name: str, chunks: str
) -> None:
    own, exact = (plain_entropy(dtype) for dtype in (torch.float32, torch.float64))
    parts = [
        load(path)
        for path in sorted((runs / f"differentiate_entropy_{name}").glob(f"{chunks}_*.pt"))
    ]
    for part in parts:
        for key in ("logprobs", "entropy", "hidden"):  # whole on every rank
            precision.assert_close(part[key], own[key], exact[key])
    # each rank has the gradient of its own rows; those that pad the vocabulary have none
    whole = torch.cat([part["weight"] for part in parts])
    precision.assert_close(whole[:101], own["weight"], exact["weight"])
    assert not whole[101:].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_are_hugging_face_log_probabilities(runs: Path, name: str, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path)
    samples = reference.make_samples()
    got = load(runs / f"score_{name}/rank0.pt")
    precision.assert_scores(by_token(got["scores"]["start"], samples), model, samples)
    train = partial(reference.train, samples=samples, steps=1, lr=ranks.LR)
    precision.assert_scores(
        by_token(got["scores"]["trained"], samples), model, samples, train=train
    )
    assert all(score.dtype == torch.float32 for score in got["scores"]["start"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reference_stays_the_model_that_training_started_from(runs: Path, name: str) -> None:
    got = load(runs / f"score_{name}/rank0.pt")
    scores = got["scores"]
    for kind in ("reference", "restored_reference"):
        assert all(map(torch.equal, scores[kind], scores["start"])), kind
    assert all(map(torch.equal, scores["restored"], scores["trained"]))
    assert not any(map(torch.equal, scores["trained"], scores["start"]))
    for parameter, tensor in got["before"].items():
        assert torch.equal(got["after"][parameter], tensor), parameter


@pytest.mark.parametrize("family", LATE)
def test_the_heads_weight_is_waited_for(runs: Path, family: str) -> None:
    found = sorted((runs / f"late_{family}").glob("rank*.json"))
    assert [json.loads(path.read_text()) for path in found] == [[]] * (
        2 * LATE[family].get("pp", 1)
    )


@pytest.mark.parametrize("name", ["tp2", "pp2", "cp2", "dp2"])
def test_scores_are_the_same_on_every_rank(runs: Path, name: str) -> None:
    first, second = (load(runs / f"score_{name}/rank{rank}.pt")["scores"] for rank in (0, 1))
    for kind, scores in first.items():
        assert all(map(torch.equal, scores, second[kind])), kind


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_a_critic_trains_like_a_linear_head_on_a_hugging_face_backbone(
    runs: Path, name: str, tmp_path: Path
) -> None:
    critic = reference.make_model("qwen2", tmp_path, critic=True)
    samples = reference.make_critic_samples()
    expected = precision.expect(critic, samples, STEPS, ranks.LR, reference.value_loss_of)
    precision.compare(runs / f"train_critic_{name}", expected)
    scores = by_token(load(runs / f"train_critic_{name}/rank0.pt")["scores"], samples)
    precision.assert_scores(scores, critic, samples, reference.values_of)


def test_a_critic_starts_afresh_and_small_on_a_policy(runs: Path) -> None:
    ran = ("train_critic_one/rank0.pt", "train_critic_tp2/rank0.pt", "train_critic_tp2/rank1.pt")
    heads = [load(runs / rank)["fresh"]["score.weight"] for rank in ran]
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert heads[0].shape == (1, 64)
    assert 0.5 < float(heads[0].std()) * 65 < 1.5  # 1 / (hidden + 1)
    backbone = load(runs / "train_critic_tp2/rank0.pt")["fresh"]
    policy = transformers.AutoModelForCausalLM.from_pretrained(runs / "policy").state_dict()
    assert torch.equal(backbone["model.norm.weight"], policy["model.norm.weight"])
    assert "lm_head.weight" not in backbone


def test_an_exported_critic_is_a_model_for_sequence_classification(runs: Path) -> None:
    folder = runs / "train_critic_tp2/exported"
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert torch.equal(
        model.score.weight, load(runs / "train_critic_tp2/rank0.pt")["fresh"]["score.weight"]
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_skipped_step_touches_nothing_on_any_rank(runs: Path, name: str) -> None:
    for path in (runs / f"train_with_spikes_{name}").iterdir():
        rows = load(path)
        flags = [
            (row["skipped_updates"], row["grad_spikes"], row["agent/a/grad_spikes"])
            for row in rows["metrics"]
        ]
        fine = (0.0, 0.0, 0.0)
        assert flags == [fine] * 6 + [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0), fine]
        assert [row["agent/b/grad_spikes"] for row in rows["metrics"]] == [0.0] * 9
        for step in (6, 7):
            for kept in ("weights", "moments"):
                assert_same(rows[kept][step], rows[kept][5])
        assert not torch.equal(
            rows["weights"][8]["model.norm.weight"], rows["weights"][5]["model.norm.weight"]
        )
        assert rows["moments"][5], "nothing was compared"


def assert_same(one: dict, other: dict) -> None:
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        else:
            assert torch.equal(value, other[name]), name


def test_a_reply_that_is_cut_over_ranks_has_one_ratio(runs: Path, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path)
    float32_errors = precision.expect(model, reference.make_samples(), 2, ranks.LR).float32
    one = load(runs / "train_sequence_loss_one/0.pt")
    for rank in (0, 1):
        cut = load(runs / f"train_sequence_loss_cp2/{rank}.pt")
        for got, want in zip(cut["metrics"], one["metrics"], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)
        gap = precision.gap(cut["weights"], one["weights"])
        assert gap <= precision.bound(float32_errors.parameters)


def test_spike_monitors_are_saved(runs: Path) -> None:
    state = json.loads((runs / "score_one/checkpoint/trainer.json").read_text())
    assert set(state["spikes"]) == {"", "a", "b"}
    assert len(state["spikes"]["a"]["norms"]) == 1


@pytest.mark.parametrize("name", REST)
def test_a_step_after_sleep_is_the_same_to_the_bit(runs: Path, name: str) -> None:
    for path in (runs / f"train_with_sleep_{name}").iterdir():
        found = load(path)
        slept, unbroken = found["rested"], found["unbroken"]
        assert slept["metrics"] == unbroken["metrics"]
        assert all(map(torch.equal, slept["scores"], unbroken["scores"]))
        assert all(
            torch.equal(tensor, unbroken["weights"][key])
            for key, tensor in slept["weights"].items()
        )


def test_memory_is_given_back_to_the_system(runs: Path) -> None:
    # embedding 150,000 · 64; norms 3 · 64; queries 64 · 64 + 64, keys and values 2 · (64 · 32 + 32), output 64 · 64;
    # gate, up and down 3 · 64 · 96
    count = 150_000 * 64 + 3 * 64 + 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 96
    found = load(runs / "train_with_sleep_one/0.pt")
    assert found["parameters"] == count
    assert found["rested"]["freed"] == [4 * count] * 3  # float32 gradients
    assert all(change < -0.9 * 4 * count for change in found["rested"]["resident"])
