"""How a step's samples are cut into optimizer steps and gone through, with the real packing."""

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig, updates_in_schedule
from mcore_mas.credit.samples import Sample
from mcore_mas.packing import pack as packing
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.trainer_specs import policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer, merge_updates, step_places
from tests.support.simulated import SimulatedGang

CRITIC = (
    "advantage=gae",
    "+policies.solver.critic={lr: 1.0e-3, head_start: 2}",
    "+policies.verifier.critic.lr=1.0e-3",
)


def turn(number: int) -> Sample:
    return Sample(
        policy="solver", agent="solver", task=str(number // 2), trajectory=f"t/{number}", turn=0,
        prompt_ids=(100 + number, 7), completion_ids=(3, 4), behaviour=(-1.0, -1.0), advantages=(1.0, 1.0),
    )  # fmt: skip


def trained(
    folder: Path,
    *overrides: str,
    step: int = 0,
    critic: SimulatedGang | None = None,
    gang: SimulatedGang | None = None,
) -> list[list[int]]:
    """The turns of each update of seven, by their first token."""
    config = RunConfig.check(
        resolve(["experiment=demo_math", f"results={folder}", *overrides]), "test"
    )
    gang = gang or SimulatedGang(lambda _: 0.0)
    trainer = PolicyTrainer("solver", config, gang, critic=critic)  # type: ignore[arg-type]
    samples = [turn(number) for number in range(7)]
    credited = [replace(s, returns=(0.0, 0.0), values=(0.0, 0.0)) if critic else s for s in samples]
    asyncio.run(trainer.update(trainer.pack(samples, step), credited, step))
    return [
        sorted(int(i) - 100 for m in update for i in m.token_ids if i >= 100)
        for update in gang.updates
    ]


def test_a_step_is_one_update_of_all(tmp_path: Path) -> None:
    assert trained(tmp_path) == [list(range(7))]


def test_minibatches_hold_so_many_turns_and_every_pass_goes_through_all(tmp_path: Path) -> None:
    once = trained(tmp_path, "+trainer.minibatch=3")
    assert [len(update) for update in once] == [3, 3, 1]
    assert sorted(i for update in once for i in update) == list(range(7))
    assert trained(tmp_path, "+trainer.minibatch=3", "+trainer.passes=2") == [*once, *once]
    assert trained(tmp_path, "+trainer.minibatch=3", step=1) != once  # another step draws others
    shares = trained(tmp_path, "+trainer.updates_per_step=2", "+trainer.passes=3")
    assert len(shares) == 6 and shares[:2] == shares[2:4] == shares[4:]
    assert sorted(i for update in shares[:2] for i in update) == list(range(7))


class _Disagreeing(SimulatedGang):
    """A trainer whose log-probabilities are 0.5 nats off, from update `first` of the step on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(lambda _: 0.0)
        self._first = first

    async def score(self, microbatches, reference=False):
        return [batch.behaviour for batch in microbatches]

    async def update(self, microbatches, at=None):
        gap = 0.5 if len(self.updates) >= self._first else 0.0
        own = {f"agent/solver/logprob_gap_{name}": gap for name in ("mean", "k3", "p99", "max")}
        return (
            await super().update(microbatches, at) | own | {"agent/solver/logprob_gap_count": 2.0}
        )


@pytest.mark.parametrize("overrides", [(), ("loss.kl.coef=0.1",), CRITIC])
def test_samples_are_packed_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = RunConfig.check(
        resolve(["experiment=demo_math", f"results={tmp_path}", *overrides]), "test"
    )
    packers: list[threading.Thread] = []

    def noted(*given: Any, **how: Any) -> Any:
        packers.append(threading.current_thread())
        return pack(*given, **how)

    monkeypatch.setattr(packing, "pack", noted)
    gang, own = _Disagreeing(99), {"critic": _Disagreeing(99)} if overrides is CRITIC else {}
    trainer = PolicyTrainer("solver", config, gang, **own)  # type: ignore[arg-type]
    batches = trainer.pack([turn(number) for number in range(7)], 0)

    async def play() -> None:
        await trainer.score(batches)
        credited = [
            replace(s, returns=(0.0, 0.0), values=(0.0, 0.0)) for b in batches for s in b.samples
        ]
        await trainer.update(batches, credited, 0)

    asyncio.run(play())
    assert packers
    assert threading.main_thread() not in packers


def test_a_step_is_judged_by_the_first_update_that_has_turns(tmp_path: Path) -> None:
    """An update before it, whose turns have no advantage, changes no weights and compares nothing."""
    config = RunConfig.check(
        resolve(["experiment=demo_math", f"results={tmp_path}", "+trainer.minibatch=1"]), "test"
    )
    gang = _Disagreeing()
    trainer = PolicyTrainer("solver", config, gang)  # type: ignore[arg-type]
    batches = trainer.pack(samples := [turn(number) for number in range(7)], 0)
    last = batches[-1].samples[0].id
    credited = [s if s.id == last else replace(s, advantages=(0.0, 0.0)) for s in samples]
    with pytest.raises(TrainingError, match=r"differ from the engine's by mean 0\.5"):
        asyncio.run(trainer.update(batches, credited, 0))
    assert len(gang.updates) == 1


def test_with_a_correction_every_update_of_the_first_pass_is_judged(tmp_path: Path) -> None:
    """All are scored by the weights that the step began with; without one, later updates are scored by others."""
    trained(tmp_path, "+trainer.minibatch=3", gang=_Disagreeing(first=1))
    corrected = ("+trainer.minibatch=3", "+loss.correction.name=tis")
    with pytest.raises(TrainingError, match=r"differ from the engine's by mean 0\.5"):
        trained(tmp_path, *corrected, gang=_Disagreeing(first=2))
    trained(
        tmp_path, *corrected, "+trainer.passes=2", gang=_Disagreeing(first=3)
    )  # the second pass says nothing new
    assert merge_updates([{"a/logprob_gap_count": 2.0}, {"a/logprob_gap_count": 3.0}]) == {
        "a/logprob_gap_count": 5.0
    }


def test_a_run_whose_gradients_are_never_finite_stops(tmp_path: Path) -> None:
    """Each such update is left out, so that the run would go on to its end and learn nothing."""
    settings = [f"results={tmp_path}", "trainer.signal_within=3", "trainer.updates_per_step=2"]
    config = RunConfig.check(resolve(["experiment=demo_math", *settings]), "test")
    norms = iter([math.nan, math.nan, math.inf, 1.0, *[math.nan] * 6])

    class Diverged(SimulatedGang):
        async def update(self, microbatches, at=None):
            return await super().update(microbatches, at) | {
                "grad_norm": next(norms),
                "skipped_updates": 1.0,
            }

    gang = Diverged(lambda _: 0.0)
    trainer = PolicyTrainer("solver", config, gang)  # type: ignore[arg-type]
    samples = [turn(number) for number in range(4)]
    for step in range(4):  # in the second one update was finite
        asyncio.run(trainer.update(trainer.pack(samples, step), samples, step))
    with pytest.raises(
        TrainingError, match="step 4: no gradient of policy solver was finite in 3 steps"
    ):
        asyncio.run(trainer.update(trainer.pack(samples, 4), samples, 4))


def test_a_critic_may_have_a_head_start(tmp_path: Path) -> None:
    for step, updates in ((0, 0), (1, 0), (2, 1)):
        critic = SimulatedGang(lambda _: 0.0)
        assert len(trained(tmp_path, *CRITIC, step=step, critic=critic)) == updates
        assert len(critic.updates) == 1


def test_samples_are_cut_in_one_way(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="minibatch and updates_per_step both split a step's samples"
    ):
        resolve(["experiment=demo_math", "+trainer.minibatch=3", "+trainer.updates_per_step=2"])


def test_with_mini_batches_a_rate_is_of_its_step(tmp_path: Path) -> None:
    """As verl's, which has mini-batches of rows: its schedule is as long as the run, in steps, whatever they hold."""
    turns = "+trainer.alternate={order: [verifier, solver], steps: 2}"
    settings = ["trainer.steps=7", "+trainer.minibatch=3", "trainer.passes=2", turns]
    falls = ["+policies.solver.schedule=linear", "policies.solver.warmup_steps=2"]
    run = RunConfig.check(resolve(["experiment=demo_math", *settings, *falls]), "test")
    assert (
        policy_spec("solver", run).decay_steps == updates_in_schedule(run, "solver") == 3
    )  # steps 2, 3 and 6
    assert [(step_places(run, "solver") or [])[step] for step in (2, 3, 6)] == [0, 1, 2]
    for overrides, places in ((("+trainer.minibatch=3",), [4] * 3), ((), [None])):
        gang = SimulatedGang(lambda _: 0.0)
        trained(tmp_path, *overrides, step=4, gang=gang)
        assert gang.places == places
    with pytest.raises(
        ConfigError,
        match=r"policies.solver: schedule 'linear' ends with update 3, but warmup_steps is",
    ):
        resolve(["experiment=demo_math", *settings, falls[0], "policies.solver.warmup_steps=3"])
