"""Trainer of one policy: optimizer steps of a training step, agreement with the engine, stops."""

import asyncio
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import schedule_length
from mcore_mas.credit.samples import Sample
from mcore_mas.packing import pack as packing
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.trainer_specs import critic_spec, policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer, schedule_positions
from rollout.records.trajectory import VersionSpan
from tests.support.simulated import SimulatedGang

CRITIC = (
    "advantage=gae",
    "+policies.solver.critic={lr: 1.0e-3, head_start: 2}",
    "+policies.verifier.critic.lr=1.0e-3",
)


def make_config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve(["experiment=demo_math", *overrides]), "test")


def make_trainer(
    config: RunConfig, group: SimulatedGang, critic: SimulatedGang | None = None
) -> PolicyTrainer:
    return PolicyTrainer("solver", config, group, critic=critic)  # type: ignore[arg-type]


def make_sample(number: int) -> Sample:
    """Return a turn of the solver whose first token is 100 + number; two turns make a task."""
    return Sample(
        policy="solver",
        agent="solver",
        task=str(number // 2),
        trajectory=f"t/{number}",
        turn=0,
        prompt_ids=(100 + number, 7),
        completion_ids=(3, 4),
        behaviour=(-1.0, -1.0),
        advantages=(1.0, 1.0),
    )


def with_returns(sample: Sample) -> Sample:
    return replace(sample, returns=(0.0, 0.0), values=(0.0, 0.0))


def update_once(
    *overrides: str,
    step: int = 0,
    critic: SimulatedGang | None = None,
    group: SimulatedGang | None = None,
) -> list[list[int]]:
    """Train on seven samples in one step; return the numbers of the samples of each update."""
    group = group or SimulatedGang(lambda _: 0.0)
    trainer = make_trainer(make_config(*overrides), group, critic)
    samples = [make_sample(number) for number in range(7)]
    credited = [with_returns(sample) for sample in samples] if critic else samples
    asyncio.run(trainer.update(trainer.make_batches(samples, step), credited, step))

    numbers_by_update = []
    for microbatches in group.updates:
        tokens = [int(token) for batch in microbatches for token in batch.token_ids]
        numbers_by_update.append(sorted(token - 100 for token in tokens if token >= 100))
    return numbers_by_update


class DisagreeingGroup(SimulatedGang):
    """Simulated trainer whose log-probabilities are off by 0.5 nats from an update of the step on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(lambda _: 0.0)
        self._first = first

    async def score(self, microbatches, reference=False):
        return [batch.behaviour for batch in microbatches]

    async def update(self, microbatches, schedule_position=None):
        gap = 0.5 if len(self.updates) >= self._first else 0.0
        metrics = await super().update(microbatches, schedule_position)
        for figure in ("mean", "k3", "p99", "max"):
            metrics[f"agent/solver/logprob_gap_{figure}"] = gap
        metrics["agent/solver/logprob_gap_count"] = 2.0
        return metrics


class ReportingGroup(SimulatedGang):
    """Simulated trainer whose updates also report these metrics."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        super().__init__(lambda _: 0.0)
        self._metrics = metrics

    async def update(self, microbatches, schedule_position=None):
        return await super().update(microbatches, schedule_position) | self._metrics


class TestUpdates:
    def test_by_default_a_step_is_one_update_on_all_samples(self) -> None:
        assert update_once() == [list(range(7))]

    def test_minibatches_split_the_samples_and_every_pass_repeats_them(self) -> None:
        one_pass = update_once("+trainer.minibatch=3")
        assert [len(update) for update in one_pass] == [3, 3, 1]
        assert sorted(number for update in one_pass for number in update) == list(range(7))
        assert update_once("+trainer.minibatch=3", "+trainer.passes=2") == [*one_pass, *one_pass]

    def test_minibatches_differ_from_step_to_step(self) -> None:
        assert update_once("+trainer.minibatch=3") != update_once("+trainer.minibatch=3", step=1)

    def test_updates_per_step_split_the_samples_by_task(self) -> None:
        updates = update_once("+trainer.updates_per_step=2", "+trainer.passes=3")
        assert len(updates) == 6
        assert updates[:2] == updates[2:4] == updates[4:]
        assert sorted(number for update in updates[:2] for number in update) == list(range(7))

    def test_minibatch_and_updates_per_step_exclude_each_other(self) -> None:
        with pytest.raises(
            ConfigError, match="minibatch and updates_per_step both split a step's samples"
        ):
            make_config("+trainer.minibatch=3", "+trainer.updates_per_step=2")

    @pytest.mark.parametrize(("step", "updates"), [(0, 0), (1, 0), (2, 1)])
    def test_a_policy_does_not_train_while_its_critic_has_a_head_start(
        self, step: int, updates: int
    ) -> None:
        critic = SimulatedGang(lambda _: 0.0)
        assert len(update_once(*CRITIC, step=step, critic=critic)) == updates
        assert len(critic.updates) == 1

    @pytest.mark.parametrize("overrides", [(), ("loss.kl.coef=0.1",), CRITIC])
    def test_samples_are_packed_in_another_thread_than_the_event_loop(
        self, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
    ) -> None:
        threads: list[threading.Thread] = []

        def recording_pack(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread())
            return pack(*args, **kwargs)

        monkeypatch.setattr(packing, "pack", recording_pack)
        critic = DisagreeingGroup(99) if overrides is CRITIC else None
        trainer = make_trainer(make_config(*overrides), DisagreeingGroup(99), critic)
        batches = trainer.make_batches([make_sample(number) for number in range(7)], 0)

        async def score_and_update() -> None:
            await trainer.score(batches)
            credited = [with_returns(sample) for batch in batches for sample in batch.samples]
            await trainer.update(batches, credited, 0)

        asyncio.run(score_and_update())
        assert threads
        assert threading.main_thread() not in threads


class TestSchedule:
    def test_with_minibatches_the_schedule_advances_once_per_step_of_the_policy(self) -> None:
        """verl's schedules are also as long as the run in steps, whatever its mini-batches hold."""
        alternate = "+trainer.alternate={order: [verifier, solver], steps: 2}"
        settings = ["trainer.steps=7", "+trainer.minibatch=3", "trainer.passes=2", alternate]
        linear = "+policies.solver.schedule=linear"
        config = make_config(*settings, linear, "policies.solver.warmup_steps=2")
        # the solver is trained in the steps 2, 3 and 6
        assert policy_spec("solver", config).decay_steps == 3
        assert schedule_length(config, "solver") == 3
        positions = schedule_positions(config, "solver")
        assert positions is not None
        assert [positions[step] for step in (2, 3, 6)] == [0, 1, 2]

        message = (
            "policies.solver: schedule 'linear' ends with training step 3, but warmup_steps is 3; "
            "lower warmup_steps, or raise trainer.steps"
        )
        with pytest.raises(ConfigError, match=message):
            make_config(*settings, linear, "policies.solver.warmup_steps=3")

    def test_the_schedule_of_a_policy_leaves_out_the_head_start_of_its_critic(self) -> None:
        config = make_config(*CRITIC, "trainer.steps=7", "+trainer.updates_per_step=3")
        assert policy_spec("solver", config).decay_steps == 5 * 3
        assert critic_spec("solver", config).decay_steps == 7 * 3

        alternate = "+trainer.alternate={order: [solver, verifier]}"
        in_turn = make_config(*CRITIC, "trainer.steps=7", alternate)
        # the solver is trained in the steps 2, 4 and 6, and its critic also in step 0
        assert policy_spec("solver", in_turn).decay_steps == 3
        assert critic_spec("solver", in_turn).decay_steps == 4

    @pytest.mark.parametrize(
        ("overrides", "positions"), [(("+trainer.minibatch=3",), [4] * 3), ((), [None])]
    )
    def test_all_updates_of_a_step_have_its_position(
        self, overrides: tuple[str, ...], positions: list[int | None]
    ) -> None:
        group = SimulatedGang(lambda _: 0.0)
        update_once(*overrides, step=4, group=group)
        assert group.schedule_positions == positions


GAPS = {
    "agent/solver/logprob_gap_mean": 0.04,
    "agent/solver/logprob_gap_k3": 0.002,
    "agent/solver/logprob_gap_p99": 0.2,
    "agent/solver/logprob_gap_max": 0.5,
    "agent/solver/logprob_gap_count": 5000.0,
    "agent/solver/logprob_gap_outlier_count": 0.0,
}


class TestAgreement:
    def update_with_gaps(self, *overrides: str) -> None:
        update_once(*overrides, "loss.correction.name=none", group=ReportingGroup(GAPS))

    def test_the_message_has_agent_figures_bounds_and_remedies(self) -> None:
        with pytest.raises(TrainingError) as caught:
            self.update_with_gaps("policies.solver.bf16=true")
        assert str(caught.value) == (
            "policy solver, agent/solver: the trainer's log-probabilities differ from the engine's "
            "by mean 0.04 (bound 0.03), k3 0.002 (bound 0.005), p99 0.2 (bound 0.3), max 0.5 nats "
            "over 5000 tokens, which is more than the rounding error of bfloat16; engine and trainer "
            "do not hold the same weights: try engine.transport: disk, and check the model; with "
            "several SGLang servers, engine.compare_servers finds a tensor in which they differ. If "
            "the kernels of engine and trainer are known to differ by as much, widen trainer.agreement"
        )

    def test_bounds_are_those_of_the_precision_or_of_the_config(self) -> None:
        self.update_with_gaps("policies.solver.bf16=true", "trainer.agreement={mean: 0.05}")
        with pytest.raises(TrainingError, match=r"max 0\.5 \(bound 0\.0001\)"):
            self.update_with_gaps("trainer.agreement={mean: 0.05}")
        with pytest.raises(TrainingError, match=r"max 0\.5 \(bound 0\.4\)"):
            self.update_with_gaps(
                "policies.solver.bf16=true", "trainer.agreement={mean: 0.05, max: 0.4}"
            )

    def test_the_first_update_that_changes_weights_is_compared(self) -> None:
        """Updates before it, whose samples have no advantage, compare nothing."""
        group = DisagreeingGroup()
        trainer = make_trainer(make_config("+trainer.minibatch=1"), group)
        samples = [make_sample(number) for number in range(7)]
        batches = trainer.make_batches(samples, 0)
        last = batches[-1].samples[0].id
        credited = [
            sample if sample.id == last else replace(sample, advantages=(0.0, 0.0))
            for sample in samples
        ]
        with pytest.raises(TrainingError, match=r"differ from the engine's by mean 0\.5"):
            asyncio.run(trainer.update(batches, credited, 0))
        assert len(group.updates) == 1

    def test_without_a_correction_only_the_first_update_is_compared(self) -> None:
        group = DisagreeingGroup(first=1)
        update_once("+trainer.minibatch=3", group=group)
        assert len(group.updates) > 1  # a later update disagreed, and was not compared

    def test_with_a_correction_all_updates_of_the_first_pass_are_compared(self) -> None:
        """All of them are scored by the weights at the start of the step."""
        overrides = ("+trainer.minibatch=3", "+loss.correction.name=tis")
        with pytest.raises(TrainingError, match=r"differ from the engine's by mean 0\.5"):
            update_once(*overrides, group=DisagreeingGroup(first=2))
        update_once(*overrides, "+trainer.passes=2", group=DisagreeingGroup(first=3))


def test_a_run_whose_gradients_are_never_finite_stops() -> None:
    """Such updates are skipped, so the run would go on to its end without learning anything."""
    config = make_config("trainer.signal_within=3", "trainer.updates_per_step=2")
    grad_norms = iter([math.nan, math.nan, math.inf, 1.0, *[math.nan] * 6])

    class DivergedGroup(SimulatedGang):
        async def update(self, microbatches, schedule_position=None):
            metrics = await super().update(microbatches, schedule_position)
            return metrics | {"grad_norm": next(grad_norms), "skipped_updates": 1.0}

    trainer = make_trainer(config, DivergedGroup(lambda _: 0.0))
    samples = [make_sample(number) for number in range(4)]
    for step in range(4):  # one gradient of step 1 is finite
        asyncio.run(trainer.update(trainer.make_batches(samples, step), samples, step))
    message = "step 5: no gradient of policy solver was finite in 3 steps"
    with pytest.raises(TrainingError, match=message):
        asyncio.run(trainer.update(trainer.make_batches(samples, 4), samples, 4))


# Overrides of the math team of the demo, after which both agents train one policy.
SHARED = ("+agents.verifier.policy=solver", "~policies.verifier")


class TestGradientShares:
    def update(self, *overrides: str, **norms: float) -> dict[str, float]:
        """Return the shares after an update in which the agents' gradients have these norms."""
        metrics = {f"agent/{agent}/grad_norm": norm for agent, norm in norms.items()}
        trainer = make_trainer(make_config(*overrides), ReportingGroup(metrics))
        samples = [make_sample(number) for number in range(7)]
        result = asyncio.run(trainer.update(trainer.make_batches(samples, 0), samples, 0))
        return {name: value for name, value in result.items() if name.endswith("gradient_share")}

    def test_the_shares_of_a_shared_policy_are_those_of_the_norms(self) -> None:
        assert self.update(*SHARED, solver=0.9, verifier=0.3) == pytest.approx(
            {"agent/solver/gradient_share": 0.75, "agent/verifier/gradient_share": 0.25}
        )

    def test_the_shares_of_a_balanced_gradient_are_those_of_the_loss_weights(self) -> None:
        balance = "loss.balance=agents"
        shares = self.update(*SHARED, balance, solver=0.9, verifier=0.3)
        assert list(shares.values()) == [0.5, 0.5]
        heavy_verifier = "+agents.verifier.loss_weight=3"
        shares = self.update(*SHARED, balance, heavy_verifier, solver=0.9, verifier=0.3)
        assert list(shares.values()) == [0.25, 0.75]

    def test_an_agent_without_a_gradient_has_a_share_of_zero(self) -> None:
        assert self.update(*SHARED, solver=0.9) == {
            "agent/solver/gradient_share": 1.0,
            "agent/verifier/gradient_share": 0.0,
        }

    def test_an_agent_that_trains_its_policy_alone_has_no_share(self) -> None:
        assert self.update(solver=0.9) == {}
        frozen_verifier = "agents.verifier.loss_weight=0"
        assert self.update(*SHARED, frozen_verifier, solver=0.9) == {}


def test_the_effective_sample_size_is_measured_if_replies_may_be_older_or_it_scales_the_rate() -> (
    None
):
    def settings(*overrides: str) -> tuple[bool, bool]:
        spec = policy_spec("solver", make_config(*overrides))
        return spec.effective_samples, spec.scales_lr

    assert settings() == (False, False)
    assert settings("trainer.staleness=1") == (True, False)
    assert settings("loss.lr_scale=effective_samples") == (True, True)


class VersionedGroup(SimulatedGang):
    """Simulated trainer whose log-probabilities are -10 minus the version of the weights."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0.0)
        self.copied_versions: list[tuple[int, int]] = []

    async def keep_version(self, version, count):
        self.copied_versions.append((version, count))

    async def score(self, microbatches, reference=False, version=None):
        assert version is None or version in dict(self.copied_versions)
        logprob = -1.0 if version is None else -10.0 - version
        return [torch.full_like(batch.behaviour, logprob) for batch in microbatches]


class TestOldPolicyOfTheSamplingWeights:
    SAMPLED = ("trainer.staleness=2", "loss=tis", "+loss.old_policy=sampled")

    def proximal(
        self, *overrides: str, steps: int, versions: tuple[tuple[int, int, int], ...]
    ) -> tuple[float, ...] | None:
        """Return `proximal` of a reply of two tokens in the last of some steps.

        Args:
            overrides: of the config.
            steps: number of steps; the version of the weights is the number of the step.
            versions: version, start and end of the spans of tokens that one version sampled.
        """
        trainer = make_trainer(make_config(*overrides), VersionedGroup())
        spans = tuple(
            VersionSpan(version=version, start=start, end=end) for version, start, end in versions
        )
        sample = replace(make_sample(0), versions=spans, behaviour=(-0.5, -0.25))
        for step in range(steps):
            batches = trainer.make_batches([sample], step)
            asyncio.run(trainer.score(batches, step))
        return batches[0].samples[0].proximal

    def test_each_token_is_scored_by_the_weights_that_sampled_it(self) -> None:
        first, second = self.proximal(*self.SAMPLED, steps=3, versions=((1, 0, 1), (2, 1, 2)))
        assert first == -11.0
        assert math.isnan(second)  # the present weights, which the update scores

    def test_two_versions_back_are_kept_with_a_staleness_of_two(self) -> None:
        proximal = self.proximal(*self.SAMPLED, steps=3, versions=((0, 0, 1), (1, 1, 2)))
        assert proximal == (-10.0, -11.0)

    def test_after_a_restart_the_engines_logprobs_take_their_place(self) -> None:
        trainer = make_trainer(make_config(*self.SAMPLED), VersionedGroup())
        sample = replace(make_sample(0), version=4, behaviour=(-0.5, -0.25))
        batches = trainer.make_batches([sample], 5)
        asyncio.run(trainer.score(batches, 5))
        assert batches[0].samples[0].proximal == (-0.5, -0.25)

    def test_by_default_old_is_the_policy_at_the_start_of_the_step(self) -> None:
        default = ("trainer.staleness=2", "loss=tis")
        assert self.proximal(*default, steps=3, versions=((1, 0, 2),)) is None

    def test_later_updates_of_a_step_keep_the_scores_of_the_sampling_weights(self) -> None:
        group = VersionedGroup()
        trainer = make_trainer(make_config(*self.SAMPLED, "+trainer.passes=2"), group)
        spans = (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=2))
        sample = replace(make_sample(0), versions=spans)

        async def take_steps() -> None:
            for step in range(2):
                batches = trainer.make_batches([sample], step)
                await trainer.score(batches, step)
            await trainer.update(batches, batches[0].samples, 1)

        asyncio.run(take_steps())
        assert group.copied_versions == [(0, 2), (1, 2)]
        for microbatches in group.updates:
            assert microbatches[0].proximal.tolist() == [-10.0, -1.0]

    def test_it_needs_a_correction(self) -> None:
        with pytest.raises(ConfigError, match="old_policy 'sampled' needs a correction"):
            make_config("+loss.old_policy=sampled")
