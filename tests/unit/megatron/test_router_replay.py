"""Router replay: the trainer sends tokens where the engine did, whatever its own router says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.model.router_replay import RoutingReplay
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling
from tests.support import ranks, reference
from tests.support.embedded import drain
from tests.support.gradients import full_gradients

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _groups(request: pytest.FixtureRequest) -> Iterator[None]:
    if "multirank" in request.keywords:  # these have processes of their own
        yield
        return
    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


def top_k(scores: torch.Tensor, k: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, k=k, dim=1)


def test_the_experts_on_record_are_taken_with_the_routers_own_scores() -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0], [5.0, 2.0, 1.0]], requires_grad=True)
    replay = RoutingReplay()
    values, chosen = replay.get_replay_topk(scores, 1, default_compute_topk=top_k)
    assert (values.tolist(), chosen.tolist()) == (
        [[3.0], [5.0]],
        [[2], [0]],
    )  # nothing is on record
    replay.recorded = torch.tensor([[0], [255]], dtype=torch.uint8)
    values, chosen = replay.get_replay_topk(scores, 1, default_compute_topk=top_k)
    assert (values.tolist(), chosen.tolist()) == (
        [[0.0], [5.0]],
        [[0], [0]],
    )  # of the second token nothing is known
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def sample(
    routing: bytes, prompt: tuple[int, ...] = (5, 6, 7), reply: tuple[int, ...] = (8, 9)
) -> Sample:
    return Sample(
        policy="p", agent="a", task="t", trajectory="1", turn=0, prompt_ids=prompt, completion_ids=reply,
        behaviour=(0.0,) * len(reply), routing=routing,
    )  # fmt: skip


def scores_of(trainer: MegatronTrainer, samples: list[Sample]) -> torch.Tensor:
    microbatches = pack(samples, 4096)
    return torch.tensor(
        [x for row in unpack(microbatches, trainer.score(microbatches), samples) for x in row]
    )


def test_a_layer_gives_exactly_what_the_named_experts_compute(tmp_path: Path) -> None:
    """By hand: softmax over the router's logits of the named two, times (silu(x gate) · x up) down of each."""
    reference.make_model("qwen3_moe", tmp_path, layers=1, mlp_only_layers=[])
    weights = load_file(tmp_path / "model.safetensors")
    layer = MegatronTrainer(TrainerSpec(model=str(tmp_path))).model.stages[0].decoder.layers[0].mlp
    x = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(3))
    logits = x[:, 0] @ weights["model.layers.0.mlp.gate.weight"].t()
    named = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 2]])
    assert (logits.topk(2).indices.sort().values != named.sort().values).any(
        1
    ).sum() >= 3  # the router chooses others

    def expert(number: int, token: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            weights[f"model.layers.0.mlp.experts.{number}.{n}_proj.weight"]
            for n in ("gate", "up", "down")
        )
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    shares = logits.gather(1, named).softmax(-1)
    by_hand = [
        sum(share * expert(number, token) for share, number in zip(own, pair.tolist(), strict=True))
        for token, own, pair in zip(x[:, 0], shares, named, strict=True)
    ]
    layer.router.router_replay.recorded = named
    output = layer(x)[0]
    assert torch.allclose(output[:, 0], torch.stack(by_hand), atol=1e-5)
    layer.router.router_replay.recorded = None
    assert not torch.allclose(layer(x)[0], output, atol=1e-2)
    # the gradient reaches the logits of the named experts, and of no others
    (of_router,) = torch.autograd.grad(output[0].square().sum(), layer.router.weight)
    assert [bool(row.any()) for row in of_router] == [True, False, False, True]


ENGINE = {"num_experts": 8, "mlp_only_layers": []}


def near_ties(folder: Path, noise: float, seed: int) -> None:
    """Have the experts of each half of a model's routers score within `noise` of each other: rounding decides."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            halves = tensor[[0, 4]].repeat_interleave(4, 0)
            weights[name] = halves + noise * torch.randn(halves.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def sampled(folder: Path, count: int = 12, **settings: object) -> list[Sample]:
    """Replies of the engine to three prompts, with the experts that it chose."""
    engine = EmbeddedEngine.from_folder(folder, max_length=64, routing=True, **settings)
    prompts = {
        i: tuple(np.random.default_rng(i % 3).integers(0, 101, 9 + i % 3).tolist())
        for i in range(count)
    }
    for number, prompt in prompts.items():
        engine.submit(number, prompt, Sampling(max_tokens=16, seed=number))
    said = drain(engine)
    return [
        replace(
            sample(said[i].routing, prompt, said[i].token_ids),
            trajectory=str(i),
            behaviour=said[i].logprobs,
        )
        for i, prompt in prompts.items()
    ]


def gap(trainer: MegatronTrainer, samples: list[Sample]) -> float:
    """Mean of exp(d) - 1 - d over sampled tokens, d trainer's less engine's log-probability: KL(engine, trainer)."""
    d = scores_of(trainer, samples) - torch.tensor(
        [x for own in samples for x in own.behaviour or ()]
    )
    return float((d.exp() - 1 - d).double().mean())


def unrouted(samples: list[Sample]) -> list[Sample]:
    return [replace(own, routing=b"") for own in samples]


@pytest.mark.parametrize(
    ("trainer", "with_replay", "ratio"),
    [
        ({}, 1e-12, 1e9),  # another router: what is left is float32's rounding
        ({"bf16": True}, 1e-4, 30),  # another precision, of the engine's own weights
    ],
)
def test_engine_and_trainer_agree_whatever_the_trainers_router_says(
    tmp_path: Path, trainer: dict, with_replay: float, ratio: float
) -> None:
    reference.make_model("qwen3_moe", tmp_path / "engine", **ENGINE)
    near_ties(tmp_path / "engine", 1e-5, seed=1)
    samples, model = sampled(tmp_path / "engine"), tmp_path / "engine"
    if not trainer:
        reference.make_model("qwen3_moe", model := tmp_path / "trainer", **ENGINE)
        near_ties(model, 1e-5, seed=2)
    own = MegatronTrainer(TrainerSpec(model=str(model), **trainer))
    replayed, free = gap(own, samples), gap(own, unrouted(samples))
    print(f"KL(engine, trainer) {replayed:.2e} with replay, {free:.2e} without")
    assert replayed < with_replay
    assert free > 1e-4
    assert free > ratio * replayed


def test_the_frozen_reference_routes_by_itself(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path, **ENGINE)
    trainer = MegatronTrainer(TrainerSpec(model=str(tmp_path)))
    routed = [sample(bytes([7, 6]) * 2 * 4)]
    batches = pack(routed, 4096)
    free = trainer.score(pack(unrouted(routed), 4096))[0]
    assert torch.equal(trainer.score(batches, reference=True)[0], free)
    assert not torch.allclose(trainer.score(batches)[0], free, atol=1e-3)


def test_what_is_computed_again_goes_the_same_way(tmp_path: Path) -> None:
    """Micro-batches of other experts follow each other, and each layer is computed again in the backward pass."""
    reference.make_model("qwen3_moe", tmp_path, **ENGINE)
    routed = [
        sample(
            bytes([first, second]) * 2 * 11,
            prompt=tuple(range(first, 10)),
            reply=(3,) * (2 + first),
        )
        for first, second in ((0, 1), (2, 7), (4, 3))
    ]
    routed = [replace(own, weight=0.1, trajectory=str(i)) for i, own in enumerate(routed)]
    found = {}
    for way in ("none", "selective", "full"):
        trainer = MegatronTrainer(ranks.make_spec(str(tmp_path), recompute=way))
        batches = pack(routed, 12)
        assert len(batches) == 3
        trainer.update(batches)
        found[way] = torch.cat(
            [gradient.double().flatten() for _, gradient in full_gradients(trainer)]
        )
    for way in ("selective", "full"):
        assert float((found[way] - found["none"]).norm() / found["none"].norm()) <= 1e-6


LAYOUTS = {
    "one rank": {},
    "EP2": {"dp": 2, "ep": 2},
    "CP2 + EP2": {"cp": 2, "ep": 2},
    "TP2 + SP": {"tp": 2, "sp": True},
    "PP2 + recompute": {"pp": 2, "recompute": "full"},
}


@pytest.mark.multirank
@pytest.mark.slow
def test_layouts_send_tokens_to_the_same_experts(tmp_path: Path) -> None:
    """Of four layers the second is dense; 300 experts take two bytes; some samples are on record, some are not."""
    reference.make_model(
        "qwen3_moe", tmp_path / "model", layers=4, num_experts=300, moe_intermediate_size=4
    )
    generator = np.random.default_rng(0)
    routed = [
        own
        if number == 3
        else replace(
            own,
            routing=np.stack([generator.permuted(np.arange(300))[:2] for _ in range(3 * tokens)])
            .astype("<u2")
            .tobytes(),
        )
        for number, own in enumerate(reference.make_samples())
        for tokens in [len(own.prompt_ids) + len(own.completion_ids) - 1]
    ]
    jobs = []
    for name, layout in (LAYOUTS | {"not on record": {}}).items():
        spec = ranks.make_spec(str(tmp_path / "model"), **layout)
        samples = unrouted(routed) if name == "not on record" else routed
        arguments = {
            "spec": spec,
            "out": tmp_path / name,
            "samples": samples,
            "steps": 1,
            "max_tokens": 12,
        }
        sizes = {size: layout[size] for size in ("tp", "pp", "cp", "dp", "ep") if size in layout}
        jobs.append(ranks.Job(function=ranks.train, arguments=arguments, **sizes))
    ranks.run_jobs(jobs)
    trained = {
        name: torch.load(tmp_path / name / "weights_0.pt", weights_only=True)
        for name in (*LAYOUTS, "not on record")
    }
    apart = {
        name: max(
            float((weights[key] - tensor).abs().max())
            for key, tensor in trained["one rank"].items()
        )
        for name, weights in trained.items()
    }
    print(apart)
    assert apart.pop("not on record") > 1e-4
    assert max(apart.values()) < 2e-6
