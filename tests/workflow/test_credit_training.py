"""Every kind of credit goes through real training steps: engines, Megatron ranks, checkpoints."""

import json
import math
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

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
from tests.support.run_folder import make_run

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
    # PPO with a critic of each policy, a KL penalty in the reward whose coefficient adapts, an entropy bonus; process
    # scores of a coach behind a real server, of which every third call is garbage and masked
    "ppo": [
        "coach=local",
        "reward.name=coach",
        "advantage=gae",
        "+policies.solver.critic={lr: 1.0e-3}",
        "+policies.verifier.critic={lr: 1.0e-3}",
        "+loss.kl={coef: 0.1, where: reward, target: 0.01, horizon: 100, estimate: k1}",
        "+loss.entropy=0.01",
    ],
    # two updates a step under truncated importance sampling, KL in the loss, groups without signal made up for
    "gspo": [
        "advantage=reinforce_pp",
        "loss=gspo",
        "+loss.correction={name: tis}",
        "+loss.kl={coef: 0.1}",
        "+trainer.updates_per_step=2",
        "filter={name: informative, resample: 1}",
    ],
    # an estimator by agent under one policy, one of them frozen; the baseline is a greedy trajectory
    "agents": [
        "agents.verifier.policy=solver",
        "~policies.verifier",
        "advantage={name: remax}",
        "+agents.verifier.advantage={name: rloo, align: 3}",
        "+agents.verifier.loss_weight=0.5",
    ],
    # adapters of two policies on one model that is held once, one with a critic, trained in turn and held near the
    # model without them
    "lora": [
        "trainer.steps=3",
        "+policies.solver.lora={rank: 4, alpha: 8}",
        "+policies.verifier.lora={rank: 2, alpha: 2, targets: [q, v]}",
        *(f"+policies.{policy}.share_base=true" for policy in ("solver", "verifier")),
        "+policies.solver.schedule=cosine",
        "policies.solver.warmup_steps=0",
        "policies.solver.lr=1.0e-3",
        "+policies.verifier.critic={lr: 1.0e-3}",
        "+agents.verifier.advantage={name: gae}",
        "+trainer.alternate={order: [solver, verifier]}",
        "+loss.kl={coef: 0.1}",
    ],
    # collection a step ahead, by the weights before, corrected for it; the slowest of each group are given up, and what
    # is written in the end are the best step's weights
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
    # a policy with an engine, a loss, micro-batches, mini-batches and passes of its own beside one with the run's
    "own": [
        "policies.verifier.own.engine={max_length: 300, slots: 3}",
        "policies.verifier.own.loss={options: {clip_high: 0.28}, kl: {coef: 0.1}}",
        "policies.verifier.own.trainer={microbatch_tokens: 300, minibatch: 2, passes: 2}",
        "+policies.verifier.schedule=linear",
        "policies.verifier.warmup_steps=0",
        "policies.solver.warmup_steps=0",
    ],
    # trees of branches, a policy that is frozen
    "trees": ["recipe=at_grpo", "+agents.verifier.loss_weight=0"],
}
# which are trained in this process; adapters on one model need actors
HERE = ("ppo", "gspo", "agents", "trees", "ahead", "own")


@pytest.fixture(params=sorted(CREDIT))
def trained(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    if (
        request.param == "ahead"
    ):  # a random model gets nothing right: say that it was best after its first step
        measured = iter([0.0, 1.0, 0.5])
        metrics = Scoreboard.metrics
        monkeypatch.setattr(
            Scoreboard, "metrics", lambda board: metrics(board) | {"accuracy": next(measured)}
        )

    def judge(body: dict, number: int) -> Response:
        return says("I cannot say." if number % 3 == 2 else f"PROCESS_SCORE: {number % 10}")

    here = training_here(monkeypatch) if request.param in HERE else nullcontext()
    with chat_server(judge) as server, here:
        url = [f"coach.url={server.url}"] if request.param == "ppo" else []
        run = make_run(tmp_path, *SETTINGS, *CREDIT[request.param], *url)
        train(run / "config.yaml")
    return request.param, run / "train"


@pytest.mark.slow
@pytest.mark.multirank
def test_every_kind_of_credit_trains(trained: tuple[str, Path]) -> None:
    kind, folder = trained
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] >= 0]
    assert [row["step"] for row in steps] == list(range(3 if kind == "lora" else 2))
    assert all(math.isfinite(value) for row in steps for value in row.values())
    done = json.loads((folder / "done.json").read_text())
    for policy, files in done["sha256"].items():
        assert "tokenizer_config.json" in files and files["model.safetensors"] == sha256(
            folder / "models" / policy / "model.safetensors"
        )
    first, last = steps[0], steps[-1]
    checkpoint = json.loads((folder / "checkpoints" / "step_000002" / "manifest.json").read_text())
    if kind == "ppo":
        assert first["policy/solver/kl_coef"] == 0.1
        # sampler and reference are the same weights at first: the estimate is 0, and the coefficient sinks
        assert first["policy/solver/reference_kl"] == pytest.approx(0.0, abs=1e-4)
        assert last["policy/solver/kl_coef"] < 0.1
        assert checkpoint["state"]["kl"]["solver"]["coefficient"] < last["policy/solver/kl_coef"]
        assert first["agent/solver/critic/value_error_squared"] > 0
        assert first["agent/solver/critic/explained_variance"] < 1
        assert "solver.critic/rank_00000.safetensors" in checkpoint["files"]
        assert first["policy/solver/critic/grad_norm"] > 0
        masked = sum(first[f"agent/{agent}/masked"] for agent in ("solver", "verifier"))
        failures = sum(first[f"coach/{agent}/failures"] for agent in ("solver", "verifier"))
        assert masked == failures
        assert 0 < first["agent/solver/reward_mean"] <= 9
        assert first["policy/solver/grad_norm"] > 0
    if kind == "gspo":
        assert first["agent/solver/correction_weight"] == pytest.approx(1.0, abs=1e-3)
        assert first["agent/solver/reference_kl"] == pytest.approx(0.0, abs=1e-3)
        saved = json.loads(
            (folder / "checkpoints" / "step_000002" / "solver" / "trainer.json").read_text()
        )
        assert 2 < saved["updates"] <= 4
    if kind == "agents":
        assert {"agent/solver/grad_norm", "agent/verifier/grad_norm"} <= first.keys()
        assert "policy/verifier/grad_norm" not in first
    if kind == "lora":
        check_lora(folder, steps)
        check_export(folder)
    if kind == "ahead":
        turns = [
            [
                turn
                for t in read_trajectories(folder / "trajectories" / f"step_{step:06d}.parquet")
                for turn in t.turns
            ]
            for step in (0, 1)
        ]
        assert {turn.oldest_version for turn in turns[0]} == {0}
        assert {turn.oldest_version for turn in turns[1]} <= {0, 1}
        assert first["staleness/max"] == 0.0
        assert first["agent/solver/logprob_gap_max"] < 1e-4
        behind = last.get("staleness/turns_1", 0.0)
        assert last["staleness/mean"] * (
            behind + last.get("staleness/turns_0", 0.0)
        ) == pytest.approx(behind)
        assert behind and "agent/solver/correction_weight" in last
        assert first["rollout/aborted"] == 2.0
        assert first["policy/solver/grad_norm"] > 0
        check_best(folder, [row["validation/accuracy"] for row in rows])
        check_repeated(folder, [turn for step in turns for turn in step])
    if kind == "own":
        check_own(folder, steps)
    if kind == "trees":
        trajectories = read_trajectories(folder / "trajectories" / "step_000000.parquet")
        assert len(trajectories) == 4  # two trees of each task
        assert {turn.node for turn in trajectories[0].turns if turn.index == 0} == {
            str(n) for n in range(8)
        }
        assert first["policy/solver/grad_norm"] > 0
        assert "policy/verifier/grad_norm" not in first
        done = json.loads((folder / "done.json").read_text())
        assert done["policies"]["verifier"].endswith("base")
    agents = ("solver",) if kind == "lora" else ("solver", "verifier")
    assert all(
        row[f"agent/{agent}/advantage_second_moment"] >= 0 for row in steps for agent in agents
    )


def check_own(folder: Path, steps: list[dict]) -> None:
    """The solver takes one update a step; the verifier two passes of two turns each, near its first model."""
    played = [
        read_trajectories(folder / "trajectories" / f"step_{step:06d}.parquet") for step in (0, 1)
    ]
    calls = [
        sum(turn.agent == "verifier" for t in trajectories for turn in t.turns)
        for trajectories in played
    ]
    updates = [2 * math.ceil(n / 2) for n in calls]
    assert min(calls) >= 4
    assert [row["policy/solver/updates"] for row in steps] == [1, 1]
    assert [row["policy/verifier/updates"] for row in steps] == updates
    saved = folder / "checkpoints" / "step_000002"
    counted = {
        p: json.loads((saved / p / "trainer.json").read_text())["updates"]
        for p in ("solver", "verifier")
    }
    assert counted == {"solver": 2, "verifier": sum(updates)}
    # all of a step's mini-batches have one rate, half way down in the second of two steps
    assert [row["policy/verifier/lr"] for row in steps] == [
        pytest.approx(1e-4),
        pytest.approx(5e-5),
    ]
    assert [row["policy/solver/lr"] for row in steps] == [pytest.approx(1e-4)] * 2
    assert all(
        "agent/verifier/reference_kl" in row and "agent/solver/reference_kl" not in row
        for row in steps
    )
    assert (
        steps[1]["agent/verifier/reference_kl"] > 0
    )  # in step 1 the verifier has left its first model


def check_lora(folder: Path, steps: list[dict]) -> None:
    """Who was updated when and with what rate, and what was written."""
    assert [row["policy/solver/updates"] for row in steps] == [1, 0, 1]
    assert [row["policy/verifier/updates"] for row in steps] == [0, 1, 0]
    for name in (
        "policy/verifier/lr",
        "agent/verifier/critic/value_error_squared",
    ):  # the critic has turns too
        assert [name in row for row in steps] == [False, True, False]
    # half a cosine over the two updates that are the solver's
    assert [row.get("policy/solver/lr") for row in steps] == [1e-3, None, pytest.approx(5e-4)]
    # in step 2 the engine sampled with merged weights, and the trainer sees the same
    assert 0 < steps[2]["agent/solver/logprob_gap_max"] < 1e-4
    assert steps[0]["agent/solver/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[2]["agent/solver/reference_kl"] > 1e-6
    played = read_trajectories(folder / "trajectories" / "step_000002.parquet")
    versions = {
        (turn.policy, turn.policy_version) for trajectory in played for turn in trajectory.turns
    }
    assert versions == {("solver", 1), ("verifier", 2)}
    base = load_file(folder.parent / "base" / "model.safetensors")
    for policy, scale, targets in (("solver", 2.0, "qkvo"), ("verifier", 1.0, "qv")):
        merged = load_file(folder / "models" / policy / "model.safetensors")
        adapter = load_file(folder / "models" / policy / "adapter" / "adapter_model.safetensors")
        assert len(adapter) == (2 * 7 if policy == "solver" else 2 * 2)  # of the one layer
        for x in targets:
            name = f"model.layers.0.self_attn.{x}_proj"
            a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            assert b.any(), name
            start = base[f"{name}.weight"]
            exact = start.double() + scale * b.double() @ a.double()
            precision.assert_close(merged[f"{name}.weight"], start + scale * b @ a, exact)
        assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


EXPORTED = "model-00001.safetensors"  # the same bytes, beside the biases of a Llama that transformers reads alike


class Sources(list[str]):
    """What exports say of where a policy is from, without what they say of the check of what they wrote."""

    def append(self, note: str) -> None:
        if " from " in note:
            super().append(note)


def check_best(folder: Path, accuracy: list[float]) -> None:
    """The finished policies, which evaluation uses, are to the bit those of the step that validated best."""
    assert accuracy == [0.0, 1.0, 0.5]  # at the start, and after each step
    done = json.loads((folder / "done.json").read_text())
    assert (done["steps"], done["policies_of_step"]) == (2, 1)
    config = config_with_seats(RunConfig.load(folder.parent / "config.yaml"), "trained", {})
    evaluated = {policy: Path(model) for policy, model in config.models.items()}
    assert evaluated == {policy: folder / "models" / policy for policy in ("solver", "verifier")}
    (folder / "done.json").unlink()  # from here on exports are of the newest checkpoint
    to, notes = folder.parent.parent, Sources()
    export(folder.parent, "solver", to / "last", notes.append)
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    for policy in evaluated:
        export(folder.parent, policy, to / policy, notes.append)
    sources = ["solver from step_000002", "solver from step_000001", "verifier from step_000001"]
    assert [note.replace(f"{folder / 'checkpoints'}/", "") for note in notes] == sources
    for policy, model in evaluated.items():
        assert sha256(model / "model.safetensors") == sha256(to / policy / EXPORTED)
    assert sha256(to / "last" / EXPORTED) != sha256(to / "solver" / EXPORTED)


def check_repeated(folder: Path, turns: list[Turn]) -> None:
    """Each turn is sampled again to the bit: by the first model, by what training exported, or begun by the one."""
    base = folder.parent / "base"
    models = {
        0: lambda _: base / "model.safetensors",
        1: lambda policy: folder.parent.parent / policy / EXPORTED,
    }
    engine = EmbeddedEngine.from_folder(base, max_length=512, rows=1, deterministic=True)
    for turn in turns:

        def weights(version: int, policy: str = turn.policy) -> Iterable[tuple[str, torch.Tensor]]:
            return load_file(models[version](policy)).items()

        assert sample_again(engine, turn, weights) == (turn.completion_ids, turn.logprobs)


def check_export(folder: Path) -> None:
    """A finished model is copied; without one, the newest checkpoint gives the same."""
    to, notes = folder.parent.parent, Sources()
    export(folder.parent, "solver", to / "finished", notes.append)
    assert notes == [f"solver from {folder / 'models' / 'solver'}"]
    (folder / "done.json").unlink()
    export(folder.parent, "solver", to / "solver", notes.append)
    export(folder.parent, "verifier", to / "verifier", notes.append, adapter=True)
    assert notes[1:] == [
        f"{policy} from {folder / 'checkpoints/step_000003'}" for policy in ("solver", "verifier")
    ]
    for name in (EXPORTED, "adapter/adapter_model.safetensors", "tokenizer.json", "config.json"):
        assert (to / "solver" / name).read_bytes() == (to / "finished" / name).read_bytes(), name
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        written = folder / "models" / "verifier" / "adapter" / name
        assert (to / "verifier" / name).read_bytes() == written.read_bytes(), name
