"""A real training that samples with a real SGLang server: the Ray actor, Megatron's trainer, hand-overs, sleep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mcore_mas.training.train import train
from rollout.engines.sglang import fleet as checks
from rollout.models.architecture import read_architecture
from rollout.models.tensors import compare
from rollout.records.files import read_trajectories
from rollout.sync.digests import SGLangDigest
from tests.support.run_folder import make_run, metrics_of
from tests.support.sglang_server import server_settings

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.multirank]

SETTINGS = [
    "engine=sglang",
    "engine.max_length=512",
    "engine.slots=16",
    "+engine.start_s=1500",
    "+engine.sleep=true",
    "agents.verifier.policy=solver",
    "~policies.verifier",
    "cold_start.base.layers=2",
    "data.validation=1",
    "trainer.group_size=4",  # SGLang's draws are nobody's to choose: enough of them for a difference in every step
    "trainer.steps=2",
    "trainer.validate_every=2",
    "reward.name=tests.support.rewards:by_first_token",  # a random model gets some of it: every step is an update
    "~reward.penalties",
    "policies.solver.lr=1.0e-3",
    "policies.solver.warmup_steps=0",
]


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_trainer_and_engine_agree_and_every_step_is_handed_over(
    sglang: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    compared: dict[int, dict[str, str]] = {}

    def noted(server: Mapping[str, str], trainer: Mapping[str, str], version: int) -> None:
        compared[version] = dict(server)
        compare(server, trainer, version)

    monkeypatch.setattr(checks, "compare", noted)
    settings = server_settings()
    on_a_cpu = settings["options"].get("device") == "cpu"
    run = make_run(
        tmp_path,
        *SETTINGS,
        f"+engine.transport={transport}",
        f"engine.python={Path(sglang).absolute()}",
        f"+engine.options={as_override(settings['options'])}",
        f"+engine.environment={as_override(settings['environment'])}",
    )
    train(run / "config.yaml")
    steps = [row for row in metrics_of(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert row["policy/solver/grad_norm"] > 0
        assert row["policy/solver/hand_over_mb"] > 0
        gaps = [value for name, value in row.items() if name.endswith("/logprob_gap_max")]
        assert 0 < max(gaps) <= 1e-4  # two implementations, the same weights
    for step in (0, 1):
        trajectories = read_trajectories(
            run / "train" / "trajectories" / f"step_{step:06d}.parquet"
        )
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        assert {turn.policy_version for turn in turns} == {step}
    if on_a_cpu:
        assert compared.keys() == {1, 2}
        assert compared[1] != compared[2]
        # what the server held in the end is what the trainer wrote in the end
        folder = run / "train" / "models" / "solver"
        vocab = read_architecture(folder).vocab
        digest = SGLangDigest(dtype="float32", tp=1, kv_heads=1, gpu=False, vocab=vocab)
        for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
            digest.add(name, tensor)
        written = digest.finish()
        assert {name: compared[2][name] for name in written} == written


def as_override(values: Mapping[str, object]) -> str:
    """A dictionary as Hydra's command line takes it."""
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items()) + "}"
