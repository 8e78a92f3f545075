"""Router replay: the trainer sends tokens to the experts that the engine used."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.model.router_replay import EngineRoutingReplay
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling
from tests.support import ranks, reference
from tests.support.embedded import drain
from tests.support.gradients import full_gradients

# Changes of the model in which engine and trainer are compared.
ENGINE_MODEL: dict[str, Any] = {"num_experts": 8, "mlp_only_layers": []}

# Fields of the TrainerSpec.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "EP2": {"dp": 2, "ep": 2},
    "CP2 + EP2": {"cp": 2, "ep": 2},
    "TP2 + SP": {"tp": 2, "sp": True},
    "PP2 + recompute": {"pp": 2, "recompute": "full"},
}


def make_sample(
    routing: bytes, prompt: tuple[int, ...] = (5, 6, 7), reply: tuple[int, ...] = (8, 9)
) -> Sample:
    return Sample(
        policy="p",
        agent="a",
        task="t",
        trajectory="1",
        turn=0,
        prompt_ids=prompt,
        completion_ids=reply,
        behaviour=(0.0,) * len(reply),
        routing=routing,
    )


def without_routing(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, routing=b"") for sample in samples]


def scores_of(trainer: MegatronTrainer, samples: Sequence[Sample]) -> Tensor:
    """Return the log-probabilities of all sampled tokens, sample by sample."""
    microbatches = pack(samples, 4096)
    rows = unpack(microbatches, trainer.score(microbatches), samples)
    return torch.tensor([score for row in rows for score in row])


def kl_of_engine(trainer: MegatronTrainer, samples: Sequence[Sample]) -> float:
    """Estimate KL(engine, trainer): the mean of exp(d) - 1 - d over sampled tokens.

    d is the log-probability of the trainer minus that of the engine.
    """
    behaviour = [logprob for sample in samples for logprob in sample.behaviour or ()]
    difference = scores_of(trainer, samples) - torch.tensor(behaviour)
    return float((difference.exp() - 1 - difference).double().mean())


def make_router_ties(folder: Path, noise: float, seed: int) -> None:
    """Make the experts of each half of a model's routers score within `noise` of each other."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            halves = tensor[[0, 4]].repeat_interleave(4, 0)
            weights[name] = halves + noise * torch.randn(halves.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def sample_from_engine(folder: Path) -> list[Sample]:
    """Sample 12 replies to three prompts, with the experts that the engine used."""
    engine = EmbeddedEngine.from_folder(folder, max_length=64, routing=True)
    prompts = []
    for number in range(12):
        random = np.random.default_rng(number % 3)
        prompts.append(tuple(random.integers(0, 101, 9 + number % 3).tolist()))
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, Sampling(max_tokens=16, seed=number))
    completions = drain(engine)
    samples = []
    for number, prompt in enumerate(prompts):
        completion = completions[number]
        sample = make_sample(completion.routing, prompt, completion.token_ids)
        samples.append(replace(sample, trajectory=str(number), behaviour=completion.logprobs))
    return samples


def top_k(scores: Tensor, k: int, *_: object) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, k=k, dim=1)


def test_without_a_record_the_router_chooses() -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0], [5.0, 2.0, 1.0]])
    values, experts = EngineRoutingReplay().get_replay_topk(scores, 1, default_compute_topk=top_k)
    assert values.tolist() == [[3.0], [5.0]]
    assert experts.tolist() == [[2], [0]]


def test_recorded_experts_have_the_scores_of_the_router() -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0], [5.0, 2.0, 1.0]], requires_grad=True)
    replay = EngineRoutingReplay()
    replay.recorded = torch.tensor([[0], [255]], dtype=torch.uint8)  # the second has no record
    values, experts = replay.get_replay_topk(scores, 1, default_compute_topk=top_k)
    assert values.tolist() == [[0.0], [5.0]]
    assert experts.tolist() == [[0], [0]]
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_a_layer_computes_the_recorded_experts(tmp_path: Path, one_rank: None) -> None:
    """Compute a layer by hand: experts weighted by the softmax over their two logits."""
    reference.make_model("qwen3_moe", tmp_path, layers=1, mlp_only_layers=[])
    weights = load_file(tmp_path / "model.safetensors")
    trainer = MegatronTrainer(TrainerSpec(model=str(tmp_path)))
    layer = trainer.model.stages[0].decoder.layers[0].mlp
    x = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(3))
    tokens = x[:, 0]
    logits = tokens @ weights["model.layers.0.mlp.gate.weight"].t()
    recorded = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 2]])
    router_choice = logits.topk(2).indices
    is_different = (router_choice.sort().values != recorded.sort().values).any(1)
    assert is_different.sum() >= 3

    def expert_output(expert: int, token: Tensor) -> Tensor:
        prefix = f"model.layers.0.mlp.experts.{expert}"
        gate = weights[f"{prefix}.gate_proj.weight"] @ token
        up = weights[f"{prefix}.up_proj.weight"] @ token
        return weights[f"{prefix}.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    shares = logits.gather(1, recorded).softmax(-1)
    expected = []
    for token, token_shares, experts in zip(tokens, shares, recorded.tolist(), strict=True):
        outputs = torch.stack([expert_output(expert, token) for expert in experts])
        expected.append(token_shares @ outputs)

    replay = layer.router.router_replay
    replay.recorded = recorded
    output = layer(x)[0]
    assert torch.allclose(output[:, 0], torch.stack(expected), atol=1e-5)
    replay.recorded = None
    assert not torch.allclose(layer(x)[0], output, atol=1e-2)

    # The gradient of the first token reaches the logits of its experts 0 and 3 only.
    (router_gradient,) = torch.autograd.grad(output[0].square().sum(), layer.router.weight)
    assert [bool(row.any()) for row in router_gradient] == [True, False, False, True]


@pytest.mark.parametrize(
    ("settings", "max_kl", "min_ratio"),
    [
        ({}, 1e-12, 1e9),  # the trainer has another router, and float32 rounds
        ({"bf16": True}, 1e-4, 30),  # the trainer has the engine's weights in bfloat16
    ],
    ids=["another router", "bfloat16"],
)
def test_engine_and_trainer_agree_with_replay(
    tmp_path: Path, one_rank: None, settings: dict[str, Any], max_kl: float, min_ratio: float
) -> None:
    engine_model = tmp_path / "engine"
    reference.make_model("qwen3_moe", engine_model, **ENGINE_MODEL)
    make_router_ties(engine_model, 1e-5, seed=1)
    samples = sample_from_engine(engine_model)
    trainer_model = engine_model
    if not settings:
        trainer_model = tmp_path / "trainer"
        reference.make_model("qwen3_moe", trainer_model, **ENGINE_MODEL)
        make_router_ties(trainer_model, 1e-5, seed=2)

    trainer = MegatronTrainer(TrainerSpec(model=str(trainer_model), **settings))
    with_replay = kl_of_engine(trainer, samples)
    without_replay = kl_of_engine(trainer, without_routing(samples))
    print(f"KL(engine, trainer) {with_replay:.2e} with replay, {without_replay:.2e} without")
    assert with_replay < max_kl
    assert without_replay > 1e-4
    assert without_replay > min_ratio * with_replay


def test_the_frozen_reference_uses_its_own_router(tmp_path: Path, one_rank: None) -> None:
    reference.make_model("qwen3_moe", tmp_path, **ENGINE_MODEL)
    trainer = MegatronTrainer(TrainerSpec(model=str(tmp_path)))
    samples = [make_sample(bytes([7, 6]) * 2 * 4)]
    batches = pack(samples, 4096)
    without_replay = trainer.score(pack(without_routing(samples), 4096))[0]
    assert torch.equal(trainer.score(batches, reference=True)[0], without_replay)
    assert not torch.allclose(trainer.score(batches)[0], without_replay, atol=1e-3)


def test_recomputed_layers_use_the_same_experts(tmp_path: Path, one_rank: None) -> None:
    """Train micro-batches with different experts, whose layers are recomputed in the backward pass."""
    reference.make_model("qwen3_moe", tmp_path, **ENGINE_MODEL)
    samples = []
    for number, (first, second) in enumerate([(0, 1), (2, 7), (4, 3)]):
        sample = make_sample(
            bytes([first, second]) * 2 * 11,
            prompt=tuple(range(first, 10)),
            reply=(3,) * (2 + first),
        )
        samples.append(replace(sample, weight=0.1, trajectory=str(number)))
    batches = pack(samples, 12)
    assert len(batches) == 3

    gradients = {}
    for recompute in ("none", "selective", "full"):
        trainer = MegatronTrainer(ranks.make_spec(str(tmp_path), recompute=recompute))
        trainer.update(batches)
        parts = [gradient.double().flatten() for _, gradient in full_gradients(trainer)]
        gradients[recompute] = torch.cat(parts)
    plain = gradients["none"]
    for recompute in ("selective", "full"):
        assert float((gradients[recompute] - plain).norm() / plain.norm()) <= 1e-6


@pytest.mark.multirank
@pytest.mark.slow
def test_all_layouts_use_the_recorded_experts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    # The second of four layers is dense.
    reference.make_model("qwen3_moe", model, layers=4, num_experts=300, moe_intermediate_size=4)
    samples = reference.with_random_routing(reference.make_samples(), experts=300, layers=3)

    def make_job(name: str, layout: dict[str, Any], samples: list[Sample]) -> ranks.Job:
        arguments = {
            "spec": ranks.make_spec(str(model), **layout),
            "out": tmp_path / name,
            "samples": samples,
            "steps": 1,
            "max_tokens": 12,
        }
        sizes = {size: layout[size] for size in ("tp", "pp", "cp", "dp", "ep") if size in layout}
        return ranks.Job(function=ranks.train, arguments=arguments, **sizes)

    jobs = [make_job(name, layout, samples) for name, layout in LAYOUTS.items()]
    jobs.append(make_job("no record", {}, without_routing(samples)))
    ranks.run_jobs(jobs)

    expected = torch.load(tmp_path / "one rank" / "weights_0.pt", weights_only=True)

    def difference(name: str) -> float:
        weights = torch.load(tmp_path / name / "weights_0.pt", weights_only=True)
        return max(float((weights[key] - tensor).abs().max()) for key, tensor in expected.items())

    for name in LAYOUTS:
        assert difference(name) < 2e-6, name
    assert difference("no record") > 1e-4
