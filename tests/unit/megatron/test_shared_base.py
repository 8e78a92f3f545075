"""Trainers of adapters that share one frozen model: the same bits as with separate models."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.rank_pool import MemoryRotation
from mcore_mas.runtime.trainer_group import TrainerGroup
from tests.support import ranks, reference

SOLVER_LORA = LoraConfig(rank=4, alpha=8.0, targets=("k", "o", "up"))
VERIFIER_LORA = LoraConfig(rank=2, alpha=2.0)

# Fields of the TrainerSpec.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sp": True, "recompute": "full"},
    "pp2": {"pp": 2, "bf16": True},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}


def make_specs(spec: TrainerSpec) -> dict[str, TrainerSpec]:
    """Return two policies with different adapters and settings, and a critic."""
    verifier = replace(spec, lora=VERIFIER_LORA, lora_seed=5)
    return {
        "solver": replace(spec, lora=SOLVER_LORA, lora_seed=3),
        "verifier": replace(verifier, lr=3e-3, weight_decay=0.1, schedule="linear", decay_steps=9),
        "critic": replace(verifier, head="value", objective=ValueObjective()),
    }


def make_separate_trainers(specs: Mapping[str, TrainerSpec]) -> dict[str, MegatronTrainer]:
    return {name: MegatronTrainer(spec) for name, spec in specs.items()}


def make_shared_trainers(specs: Mapping[str, TrainerSpec]) -> dict[str, MegatronTrainer]:
    """Return trainers that all use the frozen weights of the first one."""
    trainers: dict[str, MegatronTrainer] = {}
    base = None
    for name, spec in specs.items():
        trainers[name] = MegatronTrainer(spec, base)
        base = base or trainers[name]
    return trainers


def copy_weights(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return the adapters, and the full weights with adapters merged."""
    return ranks.copy_stream(trainer.model.adapter()) | ranks.copy_weights(trainer)


def train(trainers: Mapping[str, MegatronTrainer], out: Path) -> dict[str, Any]:
    """Update at different rates, sleep, save, score and update again; return all results."""
    batches = {name: pack(reference.make_samples(), 12) for name in trainers}
    batches["critic"] = pack(reference.make_critic_samples(), 12)
    metrics = [
        trainers[name].update(batches[name])
        for name in ("solver", "verifier", "critic", "solver", "critic", "solver")
    ]
    for trainer in trainers.values():
        trainer.sleep()
    for trainer in trainers.values():
        trainer.wake()

    scores = {}
    saved_weights = {}
    for name, trainer in trainers.items():
        ranks.save(trainer, out / name)
        scores[name] = trainer.score(batches[name])
        if name != "critic":
            scores[f"{name}/reference"] = trainer.score(batches[name], reference=True)
        saved_weights[name] = copy_weights(trainer)

    metrics += [trainer.update(batches[name]) for name, trainer in trainers.items()]
    final_weights = {name: copy_weights(trainer) for name, trainer in trainers.items()}
    return {
        "metrics": metrics,
        "scores": scores,
        "saved_weights": saved_weights,
        "final_weights": final_weights,
    }


def compare_trainers(rank: int, spec: TrainerSpec, out: Path) -> None:
    """Train with separate and with shared models, and restore the latter; every rank writes its results."""
    specs = make_specs(spec)
    separate_results = train(make_separate_trainers(specs), out / "separate")
    trainers = make_shared_trainers(specs)
    shared_results = train(trainers, out / "shared")
    first, *others = (trainer.model.base_parameters for trainer in trainers.values())
    frozen_is_shared: list[bool] = []
    for base_parameters in others:
        for name, parameter in base_parameters.items():
            if not parameter.requires_grad:
                frozen_is_shared.append(parameter is first[name])

    restored = make_shared_trainers(specs)
    for name, trainer in restored.items():
        trainer.restore(out / "shared" / name)
    restored_solver = copy_weights(restored["solver"])
    restored["verifier"].update(pack(reference.make_samples(), 12))
    result = {
        "separate": separate_results,
        "shared": shared_results,
        "frozen_is_shared": frozen_is_shared,
        "restored_solver": restored_solver,
        "solver_after_update_of_verifier": copy_weights(restored["solver"]),
        "updated_verifier": copy_weights(restored["verifier"]),
    }
    torch.save(result, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in every layout; return the folder with a subfolder for each."""
    folder = tmp_path_factory.mktemp("results")
    reference.make_model("qwen2", folder / "model")
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        arguments = {"spec": ranks.make_spec(str(folder / "model"), **layout), "out": folder / name}
        sizes = {size: layout[size] for size in ("tp", "pp", "dp") if size in layout}
        jobs.append(ranks.Job(function=compare_trainers, arguments=arguments, **sizes))
    ranks.run_jobs(jobs)
    return folder


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two nested results are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_on_a_shared_model_train_as_on_separate_models(results: Path, layout: str) -> None:
    for path in sorted((results / layout).glob("*.pt")):
        result = torch.load(path, weights_only=True)
        assert result["frozen_is_shared"]
        assert all(result["frozen_is_shared"])
        separate = result["separate"]
        shared = result["shared"]
        for name in ("metrics", "scores", "saved_weights", "final_weights"):
            assert is_equal(separate[name], shared[name]), name
        saved = shared["saved_weights"]
        assert not is_equal(saved["solver"], saved["verifier"])

        # Neither restoring nor updating another policy changes an adapter.
        assert is_equal(result["restored_solver"], saved["solver"])
        assert is_equal(result["solver_after_update_of_verifier"], saved["solver"])
        assert is_equal(result["updated_verifier"], shared["final_weights"]["verifier"])


@pytest.mark.slow
@pytest.mark.multirank
def test_policies_on_the_same_actors_train_at_once_sleep_together_and_resume(
    running_ray: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    specs = make_specs(ranks.make_spec(str(tmp_path / "model"), tp=2))
    batches = pack(reference.make_samples(), 12)

    async def run(rotation: MemoryRotation | None) -> list[Any]:
        """Return metrics and scores; with a rotation, one policy at a time is on the GPUs."""
        solver = TrainerGroup("solver", specs["solver"], threads=1, rotation=rotation)
        verifier = TrainerGroup("verifier", specs["verifier"], threads=1, base=solver)
        await asyncio.gather(verifier.ready(), solver.ready())
        metrics = await asyncio.gather(
            solver.update(batches), verifier.update(batches), solver.update(batches)
        )
        await asyncio.gather(*(group.save(tmp_path / group.policy) for group in (solver, verifier)))
        await asyncio.gather(solver.wait_written(), verifier.wait_written())
        if rotation is None:
            # The first call offloads both trainers, so the second has nothing left to free.
            assert await verifier.sleep() > 0
            assert await solver.sleep() == 0
            async with solver.awake():
                await verifier.score(batches)
            with pytest.raises(RuntimeError, match="the trainer is offloaded"):
                await solver.score(batches)
            await verifier.wake()

        scores = await asyncio.gather(solver.score(batches), verifier.score(batches))
        await verifier.update(batches)
        await verifier.restore(tmp_path / "verifier")
        restored_scores = await asyncio.gather(solver.score(batches), verifier.score(batches))
        assert is_equal(list(scores), list(restored_scores))
        verifier.close()
        return [*(update | {"device_s": 0.0} for update in metrics), *scores]

    assert is_equal(asyncio.run(run(None)), asyncio.run(run(MemoryRotation())))
