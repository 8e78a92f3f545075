"""Rollouts of a step, collected with scripted replies."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.cli.main import main
from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.training import collected_steps
from mcore_mas.training.async_rollout import RolloutBatch
from mcore_mas.training.metrics import rollout_metrics
from mcore_mas.training.step import TrainingSession
from rollout.base.errors import EngineError, PromptTooLong
from rollout.environments import math
from rollout.environments.math_notation import last_boxed
from rollout.environments.protocol import Env, Step
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.allocation import allocate
from rollout.teams.quarantine import Quarantined
from rollout.teams.team import TeamSession
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import box, make_run, task_of

REMAX = ("advantage={name: remax}", "trainer.group_size=1")


class BrokenEnv(math.MathEnv):
    """Environment whose steps raise a KeyError."""

    async def step(self, action: str) -> Step:
        raise KeyError("own")


def ten_per_success(group: Group) -> Group:
    """Reward every turn of a correct trajectory with 10, as a coach might."""

    def rewards(trajectory: Trajectory) -> list[float]:
        return [10.0 * (trajectory.outcome or 0.0) for _ in trajectory.turns]

    return allocate(group, rewards)


def answer_correctly(prompt: tuple[int, ...], call: int) -> bytes:
    return box(task_of(prompt))


def answer_even_tasks(prompt: tuple[int, ...], call: int) -> bytes:
    """Answer even tasks correctly always, and odd ones in every second call."""
    task = task_of(prompt)
    is_correct = task % 2 == 0 or call % 2
    return box(task if is_correct else -1)


def collect(session: TrainingSession, step: int = 0) -> RolloutBatch:
    return asyncio.run(session.rollouts.collect_batch(step))


def engine_of(session: TrainingSession) -> ScriptedEngine:
    return session.rollouts.team.policies["solver"].engine  # type: ignore[attr-defined]


def trajectories_in(batch: RolloutBatch) -> list[Trajectory]:
    return [trajectory for group in batch.groups for trajectory in group.trajectories]


def test_every_turn_is_rewarded_written_and_a_sample(tmp_path: Path) -> None:
    session = make_run(tmp_path, answer_correctly)
    batch = collect(session)
    assert batch.batches == 1
    assert [sample.reward for sample in batch.samples] == [1.0] * 4
    file = session.rollouts.collected.folder / "step_000000.parquet"
    assert read_trajectories(file) == trajectories_in(batch)


def test_a_step_is_written_in_another_thread_than_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def recording_write(*args: Any) -> None:
        threads.append(threading.current_thread())
        write_trajectories(*args)

    monkeypatch.setattr(collected_steps, "write_trajectories", recording_write)
    collect(make_run(tmp_path, answer_correctly))
    assert threads
    assert threading.main_thread() not in threads


class TestFilter:
    def test_without_resampling_rejected_tasks_are_left_out(self, tmp_path: Path) -> None:
        session = make_run(tmp_path, answer_even_tasks, "filter={name: informative}")
        batch = collect(session)
        odd = {task.id for task in session.rollouts.schedule.batch(0) if int(task.id) % 2}
        assert {sample.task for sample in batch.samples} == odd
        assert len(batch.groups) == 2

    def test_resampling_collects_extra_batches_until_enough_tasks_pass(
        self, tmp_path: Path
    ) -> None:
        resample = "filter={name: informative, resample: 10}"
        session = make_run(tmp_path, answer_even_tasks, resample)
        for step in range(4):
            batch = collect(session, step)
            tasks = {sample.task for sample in batch.samples}
            assert len(tasks) == 2
            assert all(int(task) % 2 for task in tasks)
            assert len(batch.groups) == 2 * batch.batches
            ids = [trajectory.id for trajectory in trajectories_in(batch)]
            assert len(set(ids)) == len(ids)
            assert [group.task for group in batch.groups[:2]] == (
                session.rollouts.schedule.batch(step)
            )

    def test_the_number_of_extra_batches_is_bounded(self, tmp_path: Path) -> None:
        resample = "filter={name: informative, resample: 2}"
        batch = collect(make_run(tmp_path, lambda prompt, call: box(-1), resample))
        assert batch.batches == 3
        assert batch.samples == ()


class TestGreedyBaseline:
    def test_each_task_is_also_played_greedily(self, tmp_path: Path) -> None:
        session = make_run(tmp_path, answer_correctly, *REMAX)
        batch = collect(session)
        temperatures = [sampling.temperature for _, sampling in engine_of(session).calls]
        assert sorted(temperatures) == [0.0, 0.0, 1.0, 1.0]
        assert [sample.scores["greedy"] for sample in batch.samples] == [1.0, 1.0]
        file = session.rollouts.collected.folder / "step_000000.parquet"
        assert len(read_trajectories(file)) == 2

    def test_a_task_without_its_baseline_does_not_train(self, tmp_path: Path) -> None:
        session = make_run(tmp_path, lambda prompt, call: box(0), *REMAX)
        engine = engine_of(session)
        generate = engine.generate
        first_task = int(session.rollouts.schedule.batch(0)[0].id)

        async def failing_generate(prompt_ids: Any, sampling: Any) -> Any:
            if sampling.temperature == 0.0 and task_of(prompt_ids) == first_task:
                raise EngineError("gone")
            return await generate(prompt_ids, sampling)

        engine.generate = failing_generate  # type: ignore[method-assign]
        batch = collect(session)
        lost, trained = trajectories_in(batch)
        assert lost.status is Status.FAILED
        assert lost.error == "no greedy baseline: EngineError: gone"
        assert {sample.trajectory for sample in batch.samples} == {trained.id}

    def test_a_sampled_and_a_greedy_trajectory_are_quarantined_in_different_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both trajectories of a task are its sample 0."""
        monkeypatch.setattr(math, "last_boxed", break_at_thirteen)
        session = make_run(tmp_path, lambda prompt, call: box(13), *REMAX)
        with pytest.raises(TrainingError, match="2 of 2 trajectories are quarantined"):
            collect(session)

        collected = session.rollouts.collected
        sampled = {file.name for file in collected.quarantine.iterdir()}
        greedy = {file.name for file in collected.greedy_quarantine.iterdir()}
        tasks = session.rollouts.schedule.batch(0)
        assert sampled == greedy == {f"0-{task.id}-0.json" for task in tasks}


def test_the_greedy_trajectory_is_rewarded_like_the_others(tmp_path: Path) -> None:
    """With a reward of 10 for success the advantage is 10 - 10, and not 10 minus outcome 1."""
    reward = f"reward={{name: {__name__}:ten_per_success}}"
    session = make_run(tmp_path, answer_correctly, *REMAX, reward, "~reward.penalties")
    batch = collect(session)
    assert [sample.reward for sample in batch.samples] == [10.0, 10.0]
    assert [sample.scores["greedy"] for sample in batch.samples] == [10.0, 10.0]
    assert [len(group.trajectories) for group in batch.groups] == [1, 1]


C3 = ("advantage=c3", "+trainer.replays.alternatives=3", "orchestra.options.max_loops=2")


class TestReplays:
    @staticmethod
    def collect_replayed(tmp_path: Path, *overrides: str) -> tuple[TrainingSession, RolloutBatch]:
        """Collect a step of solvers that are right, and verifiers that approve, if their seed is even."""

        def reply(prompt: tuple[int, ...], call: int) -> bytes:
            is_even = engine_of(session).calls[call][1].seed % 2 == 0
            if bytes(prompt).startswith(b"Check:"):
                return b"<verify>approve</verify>\0" if is_even else b"<verify>reject</verify>\0"
            return box(task_of(prompt) if is_even else -1)

        session = make_run(tmp_path, reply, *C3, *overrides)
        return session, collect(session)

    def test_every_reply_of_a_turn_is_a_sample_with_its_own_advantage(self, tmp_path: Path) -> None:
        session, batch = self.collect_replayed(tmp_path)
        config = session.config
        estimators = {agent: config.advantage_of(agent) for agent in config.agents}
        replies = group_pairs(
            ((sample.trajectory, sample.turn), sample)
            for sample in add_advantages(batch.samples, estimators)
        )
        assert {sample.policy for sample in batch.samples} == {"solver", "verifier"}
        for samples in replies.values():
            assert [sample.node for sample in samples] == ["", "1", "2", "3"]
            assert len({sample.prompt_ids for sample in samples}) == 1
            rewards = [sample.reward for sample in samples]
            for sample in samples:
                others = (sum(rewards) - sample.reward) / 3
                assert sample.advantages is not None
                assert sample.advantages[0] == pytest.approx(sample.reward - others)
        assert any(len({sample.reward for sample in samples}) > 1 for samples in replies.values())

        metrics = rollout_metrics(batch.groups)
        assert metrics["rollout/alternatives"] == 3 * len(replies)
        assert metrics["rollout/replayed_tokens"] > 0
        file = session.rollouts.collected.folder / "step_000000.parquet"
        assert read_trajectories(file) == trajectories_in(batch)

    def test_agents_of_one_policy_are_replayed_alike(self, tmp_path: Path) -> None:
        _, separate = self.collect_replayed(tmp_path / "separate")
        one_policy = ("agents.verifier.policy=solver", "~policies.verifier")
        _, shared = self.collect_replayed(tmp_path / "shared", *one_policy)
        assert {sample.policy for sample in shared.samples} == {"solver"}
        assert [(sample.id, sample.reward) for sample in shared.samples] == [
            (sample.id, sample.reward) for sample in separate.samples
        ]

    def test_the_budget_of_a_step_is_divided_among_its_trajectories(self, tmp_path: Path) -> None:
        _, batch = self.collect_replayed(tmp_path, "+trainer.replays.budget=11")
        for trajectory in trajectories_in(batch):
            alternatives = [turn for turn in trajectory.turns if turn.node]
            assert 1 <= len(alternatives) <= 11 // 4

    def test_agents_with_other_estimators_get_no_alternatives(self, tmp_path: Path) -> None:
        session, batch = self.collect_replayed(
            tmp_path,
            "+agents.verifier.advantage.name=grpo",
            "+agents.verifier.advantage.options={}",
        )
        assert {s.agent for s in batch.samples if s.is_alternative} == {"solver"}
        config = session.config
        estimators = {agent: config.advantage_of(agent) for agent in config.agents}
        without = [sample for sample in batch.samples if not sample.is_alternative]
        assert advantages_of("verifier", batch.samples, estimators) == advantages_of(
            "verifier", without, estimators
        )

    def test_only_the_policy_in_turn_is_replayed(self, tmp_path: Path) -> None:
        alternate = "trainer.alternate={order: [verifier, solver]}"
        _, batch = self.collect_replayed(tmp_path, alternate)
        assert {s.agent for s in batch.samples if s.is_alternative} == {"verifier"}


def advantages_of(
    agent: str, samples: Sequence[Sample], estimators: Mapping[str, AdvantageConfig]
) -> list[tuple[float, ...] | None]:
    """Return the advantages that the estimators give an agent's turns."""
    credited = add_advantages(samples, estimators)
    return [sample.advantages for sample in credited if sample.agent == agent]


def faulty_reward(group: Group) -> Group:
    """Raise a KeyError, as a reward with a bug might."""
    raise KeyError(group.task.id)


# Number of groups that `pay_while_rewards_are_left` rewards.
REWARDS_LEFT = {"groups": 0}


def pay_while_rewards_are_left(group: Group) -> Group:
    """Reward every turn with 1; raise an error if there are no rewards left."""
    if not REWARDS_LEFT["groups"]:
        raise ValueError("no reward is left")
    REWARDS_LEFT["groups"] -= 1
    return allocate(group, lambda trajectory: [1.0 for _ in trajectory.turns])


async def answer_without_asking(
    task: Task, team: TeamSession, env: Env, *, max_loops: int = 1
) -> None:
    """Answer the task, and ask an agent only if the task has no answer."""
    problem = env.reset(task)
    if not task.answers:
        await team.act(task.source, problem=problem)
    await env.step(task.answers[0])


class TestFailures:
    def test_an_error_of_the_reward_ends_the_run_and_the_trajectories_are_kept(
        self, tmp_path: Path
    ) -> None:
        name = f"{__name__}:{faulty_reward.__name__}"
        file = tmp_path / "trajectories" / "step_000000.parquet"
        line = faulty_reward.__code__.co_firstlineno + 2
        with pytest.raises(TrainingError) as caught:
            collect(make_run(tmp_path, answer_correctly, f"reward={{name: {name}}}"))
        message = str(caught.value)
        assert message.startswith(f"step 1: reward '{name}' raised KeyError: ")
        assert f"(test_async_rollout.py:{line}); its trajectories are in {file}" in message
        assert [t.status for t in read_trajectories(file)] == [Status.COMPLETED] * 4

    def test_batches_before_that_of_an_error_of_the_reward_are_used_after_a_restart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All rewards are equal, so that the filter rejects the first batch of two groups."""
        settings = (
            f"reward={{name: {__name__}:{pay_while_rewards_are_left.__name__}}}",
            "filter={name: informative, resample: 1}",
        )
        monkeypatch.setitem(REWARDS_LEFT, "groups", 3)
        with pytest.raises(TrainingError, match="no reward is left"):
            collect(make_run(tmp_path, answer_correctly, *settings))
        file = tmp_path / "trajectories" / "step_000000.parquet"
        assert len(read_trajectories(file)) == 8

        monkeypatch.setitem(REWARDS_LEFT, "groups", 2)  # for the second batch
        batch = collect(make_run(tmp_path, answer_correctly, *settings))
        assert batch.batches == 2
        rewards = [turn.reward for played in trajectories_in(batch) for turn in played.turns]
        assert rewards == [1.0] * 8

    def test_a_step_whose_trajectories_all_failed_ends_the_run(self, tmp_path: Path) -> None:
        def fail(prompt: tuple[int, ...], call: int) -> bytes:
            raise EngineError("no engine")

        message = "step 1: all 4 trajectories failed; the first: EngineError: no engine"
        with pytest.raises(TrainingError, match=message):
            collect(make_run(tmp_path, fail))
        # the failed trajectories are written, for the user to look into
        assert len(read_trajectories(tmp_path / "trajectories" / "step_000000.parquet")) == 4

    def test_a_step_without_a_token_to_train_ends_the_run(self, tmp_path: Path) -> None:
        orchestra = f"orchestra={{name: {__name__}:{answer_without_asking.__name__}}}"
        message = (
            "step 1: no completed trajectory has a sampled token of solver.* that can be trained on"
        )
        with pytest.raises(TrainingError, match=message):
            collect(make_run(tmp_path, answer_correctly, orchestra))
        written = read_trajectories(tmp_path / "trajectories" / "step_000000.parquet")
        assert [(t.status, t.turns) for t in written] == [(Status.COMPLETED, ())] * 4

    def test_an_environment_of_the_user_is_named_where_it_breaks(self, tmp_path: Path) -> None:
        """The tasks name another environment, math."""
        name = f"{__name__}:BrokenEnv"
        message = (
            rf"Defect: {name}\.step: KeyError: 'own' \(test_async_rollout.py:\d+\); mend the code"
        )
        with pytest.raises(TrainingError, match=message):
            collect(make_run(tmp_path, answer_correctly, f"env={{name: {name}}}"))


def break_at_thirteen(text: str) -> str | None:
    """Extract the answer of a reply, and raise a KeyError if it contains 13."""
    if "13" in text:
        raise KeyError("thirteen")
    return last_boxed(text)


def answer_thirteen(calls: int) -> Callable[[tuple[int, ...], int], bytes]:
    """Return a script that answers 13 in the first calls, and correctly after them."""
    return lambda prompt, call: box(13 if call < calls else task_of(prompt))


def replay(
    file: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Any, str]:
    """Run `mcore-mas replay`; return its exit status and output."""
    monkeypatch.setattr("sys.argv", ["mcore-mas", "replay", str(file), "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().out


def test_a_quarantined_trajectory_is_replayed_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(math, "last_boxed", break_at_thirteen)
    session = make_run(tmp_path, answer_thirteen(calls=1))
    batch = collect(session)
    [broken] = [t for t in trajectories_in(batch) if t.status is not Status.COMPLETED]
    line = break_at_thirteen.__code__.co_firstlineno + 3
    location = f"test_async_rollout.py:{line}"
    assert broken.error == f"Defect: math.step: KeyError: 'thirteen' ({location})"
    assert rollout_metrics(batch.groups)["rollout/quarantined"] == 1.0

    [file] = session.rollouts.collected.quarantine.iterdir()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(session.config.model_dump(mode="json")))
    status, output = replay(file, config, monkeypatch, capsys)
    assert status == 1
    assert "KeyError: 'thirteen'" in output

    monkeypatch.setattr(math, "last_boxed", last_boxed)
    status, output = replay(file, config, monkeypatch, capsys)
    assert status == 0
    assert "completed   outcome 0" in output


def test_a_trajectory_that_takes_too_many_turns_does_so_again_when_it_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A solver and a verifier take two turns, and one is allowed."""
    limits = ("collection.max_turns=1", "collection.max_quarantined=1")
    session = make_run(tmp_path, answer_correctly, "orchestra.options.max_loops=2", *limits)
    with pytest.raises(TrainingError, match="all 4 trajectories failed"):
        collect(session)

    file, *_ = session.rollouts.collected.quarantine.iterdir()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(session.config.model_dump(mode="json")))
    status, output = replay(file, config, monkeypatch, capsys)
    assert status == 1
    assert "Defect: orchestra: asked for more than collection.max_turns (1) turns" in output


def test_more_quarantined_trajectories_than_allowed_end_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a step may be quarantined; here 2 of 4 trajectories are."""
    monkeypatch.setattr(math, "last_boxed", break_at_thirteen)
    session = make_run(tmp_path, answer_thirteen(calls=2))
    with pytest.raises(TrainingError) as failure:
        collect(session)

    [first, _] = sorted(session.rollouts.collected.quarantine.iterdir())
    broken = Quarantined.read(first)
    _, task, sample = broken.trajectory.split("/")
    broken_title = f"sample {sample} of task {task}"
    line = break_at_thirteen.__code__.co_firstlineno + 3
    assert str(failure.value) == (
        "step 1: 2 of 4 trajectories are quarantined, more than collection.max_quarantined allows, "
        f"because your code raised an error; the first, {broken_title}: Defect: math.step: "
        f"KeyError: 'thirteen' (test_async_rollout.py:{line}); mend the code; "
        f"`mcore-mas replay {first} --config {session.config.folder}/config.yaml` plays this trajectory "
        "again"
    )


def test_a_validation_has_the_rules_of_an_evaluation(tmp_path: Path) -> None:
    """Task 0 is right, task 1 fails once and is then wrong, and the prompt of task 2 is too long."""
    attempts: list[int] = []

    def answer_zero(prompt: tuple[int, ...], call: int) -> bytes:
        task = task_of(prompt)
        attempts.append(task)
        if task == 1 and attempts.count(1) == 1:
            raise EngineError("gone")
        if task == 2:
            raise PromptTooLong("prompt of 600 tokens, and there is room for 500")
        return box(0)

    session = make_run(
        tmp_path,
        answer_zero,
        "evaluation.temperature=0.6",
        "evaluation.top_p=0.95",
        "evaluation.top_k=20",
        "evaluation.retries=1",
        "trainer.validation_samples=1",
    )
    epoch = [task for step in range(4) for task in session.rollouts.schedule.batch(step)]
    tasks = tuple(sorted(epoch, key=lambda task: task.id)[:3])
    board = asyncio.run(replace(session.rollouts, validation=tasks).validate())
    metrics = board.metrics()
    assert metrics.pop("ci_low") < 1 / 3 < metrics.pop("ci_high")
    assert metrics == {
        "failed": 0.0,
        "overlong": 1.0,
        "accuracy": pytest.approx(1 / 3),
        "valid_ratio": 1.0,
    }
    assert sorted(attempts) == [0, 1, 1, 2]
    samplings = [sampling for _, sampling in engine_of(session).calls]
    assert {(s.temperature, s.top_p, s.top_k) for s in samplings} == {(0.6, 0.95, 20)}
