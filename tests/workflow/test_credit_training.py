"""Real training steps with every kind of credit: engines, Megatron ranks, checkpoints, exports."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.export import export
from mcore_mas.evaluation.measure import Scoreboard
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.training.train import train
from rollout.base.digests import sha256
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Turn
from tests.support import precision
from tests.support.chat_server import Response, chat_server, says
from tests.support.in_process import training_here
from tests.support.replay import sample_again
from tests.support.run_folder import make_run, metrics_of

SETTINGS = [
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
    "policies.solver.tp=1",
    "data.validation=1",
    "trainer.steps=2",
    "trainer.checkpoint_every=1",
    "trainer.validate_every=2",
]
CREDIT = {
    # PPO: a critic of each policy, a KL penalty in the reward with an adaptive coefficient, and an
    # entropy bonus. The scores are those of a coach, every third of whose answers cannot be parsed.
    "ppo": [
        "coach=local",
        "reward.name=coach",
        "advantage=gae",
        "+policies.solver.critic={lr: 1.0e-3}",
        "+policies.verifier.critic={lr: 1.0e-3}",
        "+loss.kl={coef: 0.1, where: reward, target: 0.01, horizon: 100, estimate: k1}",
        "+loss.entropy=0.01",
    ],
    # GSPO: two updates a step with truncated importance sampling, KL in the loss, and new groups in
    # place of those without signal.
    "gspo": [
        "advantage=reinforce_pp",
        "loss=gspo",
        "+loss.correction={name: tis}",
        "+loss.kl={coef: 0.1}",
        "+trainer.updates_per_step=2",
        "filter={name: informative, resample: 1}",
    ],
    # Each agent of one policy has its own estimator and weight; a baseline is a greedy trajectory.
    "agents": [
        "agents.verifier.policy=solver",
        "~policies.verifier",
        "advantage={name: remax}",
        "+agents.verifier.advantage={name: rloo, align: 3}",
        "+agents.verifier.loss_weight=0.5",
    ],
    # Adapters of two policies on one shared model, one with a critic. They are trained in turn, with
    # a KL penalty towards the model without adapters.
    "lora": [
        "trainer.steps=3",
        "+policies.solver.lora={rank: 4, alpha: 8}",
        "+policies.verifier.lora={rank: 2, alpha: 2, targets: [q, v]}",
        "+policies.solver.share_base=true",
        "+policies.verifier.share_base=true",
        "+policies.solver.schedule=cosine",
        "policies.solver.warmup_steps=0",
        "policies.solver.lr=1.0e-3",
        "+policies.verifier.critic={lr: 1.0e-3}",
        "+agents.verifier.advantage={name: gae}",
        "+trainer.alternate={order: [solver, verifier]}",
        "+loss.kl={coef: 0.1}",
    ],
    # Rollouts are collected one step ahead of training, with a correction for their older weights. The
    # slowest of each group are cancelled. The finished models are those of the best step.
    "ahead": [
        "+trainer.staleness=1",
        "+trainer.oversample=1.5",
        "+loss.correction={name: icepop}",
        "+policies.solver.max_in_flight=3",
        "+tracking.traces=2",
        "+engine.deterministic=true",
        "trainer.validate_every=1",
        "+trainer.keep_checkpoints=1",
        "+trainer.keep_best=1",
        "+trainer.final=best",
    ],
    # The verifier has its own engine, loss, micro-batches, mini-batches and passes.
    "own": [
        "policies.verifier.overrides.engine={max_length: 300, slots: 3}",
        "policies.verifier.overrides.loss={options: {clip_high: 0.28}, kl: {coef: 0.1}}",
        "policies.verifier.overrides.trainer={microbatch_tokens: 300, minibatch: 2, passes: 2}",
        "+policies.verifier.schedule=linear",
        "policies.verifier.warmup_steps=0",
        "policies.solver.warmup_steps=0",
    ],
    # On-policy distillation: the verifier teaches the solver beside the reward, and learns from a frozen
    # model alone, which no agent plays.
    "teachers": [
        "+policies.solver.teacher={policy: verifier, coef: 0.5}",
        "+policies.frozen={model: '${policies.verifier.model}'}",
        "+policies.verifier.teacher={policy: frozen, alone: true}",
    ],
    # C3 one step ahead of training: an alternative of each turn, and no other difference of outcomes than a
    # random bonus of each reply.
    "replays": [
        "advantage=c3",
        "+trainer.replays={alternatives: 1}",
        "+trainer.staleness=1",
        "reward.name=shared_outcome",
        r"+reward.penalties={tests.support.rewards\:first_token: {}}",
    ],
    # AT-GRPO: trees of branches; the verifier is frozen.
    "trees": ["recipe=at_grpo", "+agents.verifier.loss_weight=0"],
}
# These are trained in this process. Adapters on a shared model need Ray actors.
IN_PROCESS = ("ppo", "gspo", "agents", "trees", "ahead", "own", "teachers", "replays")

BEST_ACCURACIES = [0.0, 1.0, 0.5]  # of run `ahead`, at the start and after each step


def judge(body: dict[str, Any], number: int) -> Response:
    """Answer as a coach, every third of whose answers has no score."""
    verdict = f"OWN_ANSWER: 3\nPROCESS_SCORE: {number % 10}"
    return says("I cannot say." if number % 3 == 2 else verdict)


@pytest.fixture(params=sorted(CREDIT))
def trained(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """Train a run; return the name of its settings and its folder `train`."""
    kind = request.param
    if kind == "ahead":
        # A random model solves no task, so the accuracies of its validations are replaced.
        accuracies = iter(BEST_ACCURACIES)
        metrics = Scoreboard.metrics
        monkeypatch.setattr(
            Scoreboard, "metrics", lambda board: metrics(board) | {"accuracy": next(accuracies)}
        )
    ray = training_here(monkeypatch) if kind in IN_PROCESS else nullcontext()
    with chat_server(judge) as server, ray:
        settings = [*SETTINGS, *CREDIT[kind]]
        if kind == "ppo":
            settings.append(f"coach.url={server.url}")
        run = make_run(tmp_path, *settings)
        train(run / "config.yaml")
    return kind, run / "train"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_turns(folder: Path, step: int) -> list[Turn]:
    """Return the turns of all trajectories of a step."""
    turns: list[Turn] = []
    for trajectory in read_trajectories(folder / "trajectories" / f"step_{step:06d}.parquet"):
        turns += trajectory.turns
    return turns


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.usefixtures("forked_ray_workers")
def test_every_kind_of_credit_trains(trained: tuple[str, Path]) -> None:
    kind, folder = trained
    rows = metrics_of(folder.parent)
    steps = [row for row in rows if row["step"] >= 0]
    assert [row["step"] for row in steps] == list(range(3 if kind == "lora" else 2))
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
    for policy, digests in read_json(folder / "done.json")["sha256"].items():
        assert "tokenizer_config.json" in digests
        weights = folder / "models" / policy / "model.safetensors"
        assert digests["model.safetensors"] == sha256(weights)
    agents = ("solver",) if kind == "lora" else ("solver", "verifier")
    for row in steps:
        for agent in agents:
            assert row[f"agent/{agent}/advantage_second_moment"] >= 0

    match kind:
        case "ppo":
            check_ppo(folder, steps)
        case "gspo":
            check_gspo(folder, steps)
        case "agents":
            assert {"agent/solver/grad_norm", "agent/verifier/grad_norm"} <= steps[0].keys()
            assert "policy/verifier/grad_norm" not in steps[0]
        case "lora":
            check_lora(folder, steps)
            check_exports_of_a_finished_run(folder)
        case "ahead":
            check_ahead(folder, steps)
            check_best_step(folder, [row["validation/accuracy"] for row in rows])
            check_turns_can_be_sampled_again(folder)
        case "own":
            check_own_settings(folder, steps)
        case "trees":
            check_trees(folder, steps)
        case "replays":
            check_replays(folder, steps)
        case "teachers":
            check_teachers(folder, steps)


def check_ppo(folder: Path, steps: list[dict[str, Any]]) -> None:
    first = steps[0]
    last = steps[-1]
    checkpoint = read_json(folder / "checkpoints" / "step_000002" / "manifest.json")

    # At first the policy equals the reference: the estimated KL is 0, and the coefficient decreases.
    assert first["policy/solver/kl_coef"] == 0.1
    assert first["policy/solver/reference_kl"] == pytest.approx(0.0, abs=1e-4)
    assert last["policy/solver/kl_coef"] < 0.1
    assert checkpoint["state"]["kl"]["solver"]["coefficient"] < last["policy/solver/kl_coef"]

    assert first["agent/solver/critic/value_error_squared"] > 0
    assert first["agent/solver/critic/explained_variance"] < 1
    assert "solver.critic/rank_00000.safetensors" in checkpoint["files"]
    assert first["policy/solver/critic/grad_norm"] > 0

    # Turns whose scores the coach did not give are masked.
    masked = sum(first[f"agent/{agent}/masked"] for agent in ("solver", "verifier"))
    failures = sum(first[f"coach/{agent}/failures"] for agent in ("solver", "verifier"))
    assert masked == failures
    assert 0 < first["agent/solver/reward_mean"] <= 9
    assert first["policy/solver/grad_norm"] > 0


def check_gspo(folder: Path, steps: list[dict[str, Any]]) -> None:
    assert steps[0]["agent/solver/correction_weight"] == pytest.approx(1.0, abs=1e-3)
    assert steps[0]["agent/solver/reference_kl"] == pytest.approx(0.0, abs=1e-3)
    state = read_json(folder / "checkpoints" / "step_000002" / "solver" / "trainer.json")
    assert 2 < state["updates"] <= 4


def check_trees(folder: Path, steps: list[dict[str, Any]]) -> None:
    trajectories = read_trajectories(folder / "trajectories" / "step_000000.parquet")
    assert len(trajectories) == 4  # two trees of each task
    first_nodes = {turn.node for turn in trajectories[0].turns if turn.index == 0}
    assert first_nodes == {str(number) for number in range(8)}
    assert steps[0]["policy/solver/grad_norm"] > 0
    assert "policy/verifier/grad_norm" not in steps[0]
    # The finished model of a frozen policy is its base model.
    assert read_json(folder / "done.json")["policies"]["verifier"].endswith("base")


def check_replays(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Check that each turn has an alternative, also if older weights sampled both, and that both policies train."""
    for number, row in enumerate(steps):
        alternatives = 0
        for trajectory in read_trajectories(folder / "trajectories" / f"step_{number:06d}.parquet"):
            replies = Counter(turn.index for turn in trajectory.turns)
            assert replies == {turn.index: 2 for turn in trajectory.path}
            alternatives += len(trajectory.path)
        assert row["rollout/alternatives"] == alternatives
        for policy in ("solver", "verifier"):
            assert row[f"policy/{policy}/grad_norm"] > 0
    assert steps[1]["staleness/mean"] > 0


def check_teachers(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Check that the divergence from a teacher is 0 while it has the student's weights."""
    for policy in ("solver", "verifier"):
        assert steps[0][f"policy/{policy}/teacher_kl"] == pytest.approx(0.0, abs=1e-5)
        assert abs(steps[1][f"policy/{policy}/teacher_kl"]) > 1e-5
    # The verifier's rewards differ, but it learns from its teacher alone.
    assert steps[0]["agent/solver/advantage_second_moment"] > 0.1
    assert steps[0]["agent/verifier/advantage_second_moment"] < 1e-8
    assert set(read_json(folder / "done.json")["sha256"]) == {"solver", "verifier"}
    config = RunConfig.load(folder.parent / "config.yaml")
    assert set(config_with_seats(config, "base").policies) == {"solver", "verifier"}


def check_own_settings(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Check that the solver takes one update a step, and the verifier two passes of two turns each."""
    calls = []
    for step in (0, 1):
        turns = read_turns(folder, step)
        calls.append(sum(turn.agent == "verifier" for turn in turns))
    assert min(calls) >= 4
    updates = [2 * math.ceil(count / 2) for count in calls]
    assert [row["policy/solver/updates"] for row in steps] == [1, 1]
    assert [row["policy/verifier/updates"] for row in steps] == updates
    checkpoint = folder / "checkpoints" / "step_000002"
    assert read_json(checkpoint / "solver" / "trainer.json")["updates"] == 2
    assert read_json(checkpoint / "verifier" / "trainer.json")["updates"] == sum(updates)

    # All mini-batches of a step have one learning rate. In the second of two steps it is halved.
    verifier_rates = [row["policy/verifier/lr"] for row in steps]
    assert verifier_rates == [pytest.approx(1e-4), pytest.approx(5e-5)]
    assert [row["policy/solver/lr"] for row in steps] == [pytest.approx(1e-4)] * 2

    # Only the verifier has a reference, from which it differs after the first step.
    for row in steps:
        assert "agent/verifier/reference_kl" in row
        assert "agent/solver/reference_kl" not in row
    assert steps[1]["agent/verifier/reference_kl"] > 0


def check_lora(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Check the alternating updates, their learning rates, the weight versions and the adapters."""
    assert [row["policy/solver/updates"] for row in steps] == [1, 0, 1]
    assert [row["policy/verifier/updates"] for row in steps] == [0, 1, 0]
    # The critic is updated together with its policy.
    for name in ("policy/verifier/lr", "agent/verifier/critic/value_error_squared"):
        assert [name in row for row in steps] == [False, True, False]
    # Half of a cosine over the two updates of the solver
    assert [row.get("policy/solver/lr") for row in steps] == [1e-3, None, pytest.approx(5e-4)]

    # In step 2 the engine samples with merged weights, and the trainer computes with adapters.
    assert 0 < steps[2]["agent/solver/logprob_gap_max"] < 1e-4
    assert steps[0]["agent/solver/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[2]["agent/solver/reference_kl"] > 1e-6
    versions = {(turn.policy, turn.policy_version) for turn in read_turns(folder, 2)}
    assert versions == {("solver", 1), ("verifier", 2)}

    check_merged_weights(folder, "solver", scale=2.0, targets="qkvo", adapter_tensors=2 * 7)
    check_merged_weights(folder, "verifier", scale=1.0, targets="qv", adapter_tensors=2 * 2)


def check_merged_weights(
    folder: Path, policy: str, *, scale: float, targets: str, adapter_tensors: int
) -> None:
    """Check that the finished model of one layer is W + scale B A, computed in float64."""
    base = load_file(folder.parent / "base" / "model.safetensors")
    merged = load_file(folder / "models" / policy / "model.safetensors")
    adapter = load_file(folder / "models" / policy / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == adapter_tensors
    for target in targets:
        name = f"model.layers.0.self_attn.{target}_proj"
        a = adapter[f"base_model.model.{name}.lora_A.weight"]
        b = adapter[f"base_model.model.{name}.lora_B.weight"]
        assert b.any(), name
        weight = base[f"{name}.weight"]
        exact = weight.double() + scale * b.double() @ a.double()
        precision.assert_close(merged[f"{name}.weight"], weight + scale * b @ a, exact)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


# Exported weights have the bytes of the finished model. A second file has biases, so that
# transformers reads the model as a Llama.
EXPORTED_WEIGHTS = "model-00001.safetensors"


class SourceNotes(list[str]):
    """Notes of exports that name the source of a policy; other notes are dropped."""

    def append(self, note: str) -> None:
        if " from " in note:
            super().append(note)


def check_ahead(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Check the weight versions of turns, the staleness metrics and the cancelled trajectories."""
    first = steps[0]
    last = steps[-1]
    assert {turn.oldest_version for turn in read_turns(folder, 0)} == {0}
    assert {turn.oldest_version for turn in read_turns(folder, 1)} <= {0, 1}
    assert first["staleness/max"] == 0.0
    assert first["agent/solver/logprob_gap_max"] < 1e-4
    stale_turns = last.get("staleness/turns_1", 0.0)
    all_turns = stale_turns + last.get("staleness/turns_0", 0.0)
    assert last["staleness/mean"] * all_turns == pytest.approx(stale_turns)
    assert stale_turns
    assert "agent/solver/correction_weight" in last
    # The first replies were sampled with the weights that are trained, so their weights are all 1.
    assert first["policy/solver/effective_sample_share"] == pytest.approx(1.0, abs=1e-3)
    assert 0 < last["policy/solver/effective_sample_share"] <= 1
    assert first["rollout/aborted"] == 2.0
    assert first["policy/solver/grad_norm"] > 0


def check_best_step(folder: Path, accuracies: list[float]) -> None:
    """Check that the finished policies, which evaluation uses, have the bits of the best step.

    Exports of the checkpoints stay in the folder of results.
    """
    assert accuracies == BEST_ACCURACIES
    record = read_json(folder / "done.json")
    assert record["steps"] == 2
    assert record["policies_of_step"] == 1
    config = config_with_seats(RunConfig.load(folder.parent / "config.yaml"), "trained", {})
    models = {policy: Path(model) for policy, model in config.models.items()}
    assert models == {policy: folder / "models" / policy for policy in ("solver", "verifier")}

    # Without done.json, the newest checkpoint is exported.
    results = folder.parent.parent
    checkpoints = folder / "checkpoints"
    notes = SourceNotes()
    (folder / "done.json").unlink()
    export(folder.parent, "solver", results / "last", notes.append)
    shutil.rmtree(checkpoints / "step_000002")
    for policy in models:
        export(folder.parent, policy, results / policy, notes.append)
    assert [note.replace(f"{checkpoints}/", "") for note in notes] == [
        "solver from step_000002",
        "solver from step_000001",
        "verifier from step_000001",
    ]
    for policy, model in models.items():
        assert sha256(model / "model.safetensors") == sha256(results / policy / EXPORTED_WEIGHTS)
    last_weights = sha256(results / "last" / EXPORTED_WEIGHTS)
    assert last_weights != sha256(results / "solver" / EXPORTED_WEIGHTS)


def check_turns_can_be_sampled_again(folder: Path) -> None:
    """Check that each turn has the bits of a new sample by its weight versions.

    Version 0 is the base model, version 1 the exported policy of the first step. Some turns have both.
    """
    base = folder.parent / "base"
    engine = EmbeddedEngine.from_folder(base, max_length=512, rows=1, deterministic=True)
    for turn in [*read_turns(folder, 0), *read_turns(folder, 1)]:
        exported = folder.parent.parent / turn.policy / EXPORTED_WEIGHTS
        files = {0: base / "model.safetensors", 1: exported}

        def weights(
            version: int, files: dict[int, Path] = files
        ) -> Iterable[tuple[str, torch.Tensor]]:
            return load_file(files[version]).items()

        assert sample_again(engine, turn, weights) == (turn.completion_ids, turn.logprobs)


def check_exports_of_a_finished_run(folder: Path) -> None:
    """Check that an export copies a finished model, and otherwise exports equal files from a checkpoint."""
    results = folder.parent.parent
    notes = SourceNotes()
    export(folder.parent, "solver", results / "finished", notes.append)
    assert notes == [f"solver from {folder / 'models' / 'solver'}"]

    (folder / "done.json").unlink()
    export(folder.parent, "solver", results / "solver", notes.append)
    export(folder.parent, "verifier", results / "verifier", notes.append, adapter=True)
    checkpoint = folder / "checkpoints/step_000003"
    assert notes[1:] == [f"solver from {checkpoint}", f"verifier from {checkpoint}"]
    for name in (
        EXPORTED_WEIGHTS,
        "adapter/adapter_model.safetensors",
        "tokenizer.json",
        "config.json",
    ):
        from_checkpoint = (results / "solver" / name).read_bytes()
        assert from_checkpoint == (results / "finished" / name).read_bytes(), name
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        from_checkpoint = (results / "verifier" / name).read_bytes()
        written = folder / "models" / "verifier" / "adapter" / name
        assert from_checkpoint == written.read_bytes(), name
