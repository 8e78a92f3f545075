"""Trainers of adapters that hold their frozen model once do what they do with a copy each, to the bit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.rank_pool import TrainerTurns
from mcore_mas.runtime.trainer_group import TrainerGroup
from tests.support import ranks, reference

SOLVER = LoraConfig(rank=4, alpha=8.0, targets=("k", "o", "up"))
VERIFIER = LoraConfig(rank=2, alpha=2.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, "sp": True, "recompute": "full"},
    "pp2": {"pp": 2, "bf16": True},
    "dp2": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}


def specs_of(spec: TrainerSpec) -> dict[str, TrainerSpec]:
    """A policy, another with adapters and settings of its own, and a critic."""
    return {
        "solver": replace(spec, lora=SOLVER, lora_seed=3),
        "verifier": replace(
            spec,
            lora=VERIFIER,
            lora_seed=5,
            lr=3e-3,
            weight_decay=0.1,
            schedule="linear",
            decay_steps=9,
        ),
        "critic": replace(
            spec, lora=VERIFIER, lora_seed=5, head="value", objective=ValueObjective()
        ),
    }


def state_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return ranks.copy_stream(trainer.model.adapter()) | ranks.copy_weights(trainer)


def act(trainers: dict[str, MegatronTrainer], out: Path) -> dict[str, Any]:
    """Updates at different cadences, scores, a sleep, checkpoints; what all of it came to."""
    batches = {name: pack(reference.make_samples(), 12) for name in trainers}
    batches["critic"] = pack(reference.make_critic_samples(), 12)
    got: dict[str, Any] = {"metrics": [], "scores": {}, "state": {}, "resumed": {}}
    for name in ("solver", "verifier", "critic", "solver", "critic", "solver"):
        got["metrics"].append(trainers[name].update(batches[name]))
    for trainer in trainers.values():
        trainer.sleep()
    for trainer in trainers.values():
        trainer.wake()
    for name, trainer in trainers.items():
        ranks.save(trainer, out / name)
        got["scores"][name] = trainer.score(batches[name])
        if name != "critic":
            got["scores"][f"{name}/reference"] = trainer.score(batches[name], reference=True)
        got["state"][name] = state_of(trainer)
    got["metrics"] += [trainer.update(batches[name]) for name, trainer in trainers.items()]
    got["next"] = {name: state_of(trainer) for name, trainer in trainers.items()}
    return got


def beside(rank: int, spec: TrainerSpec, out: Path) -> None:
    """The same acts by trainers with a copy each and by trainers on one base, and what follows a restore of these."""
    specs = specs_of(spec)

    def gang() -> dict[str, MegatronTrainer]:
        made: dict[str, MegatronTrainer] = {}
        for name, own in specs.items():
            made[name] = MegatronTrainer(own, next(iter(made.values()), None))
        return made

    apart = act({name: MegatronTrainer(own) for name, own in specs.items()}, out / "apart")
    shared = gang()
    together = act(shared, out / "together")
    first, *others = (trainer.model.base_parameters for trainer in shared.values())
    resumed = gang()
    for name, trainer in resumed.items():
        trainer.restore(out / "together" / name)
    trained = {"solver": state_of(resumed["solver"])}  # the others are where they were
    resumed["verifier"].update(pack(reference.make_samples(), 12))
    found = {
        "same": [
            tensor is first[name]
            for base in others
            for name, tensor in base.items()
            if not tensor.requires_grad
        ],
        "trained": trained,
        "verifier": state_of(resumed["verifier"]),
    }
    torch.save({"apart": apart, "together": together, **found}, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every layout came to."""
    folder = tmp_path_factory.mktemp("runs")
    reference.make_model("qwen2", folder / "model")
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        arguments = {"spec": ranks.make_spec(str(folder / "model"), **layout), "out": folder / name}
        sizes = {size: layout[size] for size in ("tp", "pp", "dp") if size in layout}
        jobs.append(ranks.Job(function=beside, arguments=arguments, **sizes))
    ranks.run_jobs(jobs)
    return folder


def same(one: Any, other: Any) -> bool:
    """Whether two nested results are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_on_one_base_train_as_on_bases_of_their_own(runs: Path, layout: str) -> None:
    for path in sorted((runs / layout).glob("*.pt")):
        got = torch.load(path, weights_only=True)
        assert got["same"] and all(got["same"])
        for part in ("metrics", "scores", "state", "next"):
            assert same(got["apart"][part], got["together"][part]), part
        solver, verifier = (got["together"]["state"][name] for name in ("solver", "verifier"))
        assert not same(solver, verifier)
        # neither a restore nor another policy's update moves an adapter
        assert same(got["trained"]["solver"], solver)
        assert same(got["verifier"], got["together"]["next"]["verifier"])


@pytest.mark.slow
@pytest.mark.multirank
def test_policies_on_the_same_actors_train_at_once_sleep_as_one_and_resume(
    running_ray: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    specs = specs_of(ranks.make_spec(str(tmp_path / "model"), tp=2))
    batches = pack(reference.make_samples(), 12)

    async def play(turns: TrainerTurns | None) -> list[Any]:
        solver = TrainerGroup("solver", specs["solver"], threads=1, turns=turns)
        verifier = TrainerGroup("verifier", specs["verifier"], threads=1, base=solver)
        await asyncio.gather(verifier.ready(), solver.ready())
        updates = await asyncio.gather(
            solver.update(batches), verifier.update(batches), solver.update(batches)
        )
        await asyncio.gather(*(group.save(tmp_path / group.policy) for group in (solver, verifier)))
        await asyncio.gather(solver.written(), verifier.written())
        if turns is None:
            assert (
                await verifier.sleep() > 0 == await solver.sleep()
            )  # all of it is given away already
            async with solver.awake():
                await verifier.score(batches)
            with pytest.raises(RuntimeError, match="the trainer is offloaded"):
                await solver.score(batches)
            await verifier.wake()
        scores = await asyncio.gather(solver.score(batches), verifier.score(batches))
        await verifier.update(batches)
        await verifier.restore(tmp_path / "verifier")
        again = await asyncio.gather(solver.score(batches), verifier.score(batches))
        assert same(list(scores), list(again))
        verifier.close()
        return [*({**own, "device_s": 0.0} for own in updates), *scores]

    assert same(asyncio.run(play(None)), asyncio.run(play(TrainerTurns())))
