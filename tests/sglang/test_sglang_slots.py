"""Adapters on a real server: log-probabilities of two adapters and the bare model in one batch, amid hand-overs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mcore_mas.training.train import train
from rollout.engines.adapters import adapter_engines
from rollout.engines.sglang.adapters import AdapterServers
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.adapter_weights import AdapterShape
from rollout.models.layout import Projection
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Sampling
from tests.contract.test_engines import LOGPROB_TOLERANCE, max_error
from tests.sglang.test_sglang_training import SETTINGS, as_override
from tests.support.lora import ALPHA, RANK, adapt, tensors_of
from tests.support.run_folder import make_run, metrics_of
from tests.support.sglang_server import server_settings
from tests.support.tiny import MAX_LENGTH, make_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

ALL: tuple[Projection, ...] = ("q", "k", "v", "o", "gate", "up", "down")


def test_logprobs_are_those_of_each_adapter(sglang: str, tmp_path: Path) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    folder = tmp_path / "model"
    make_model(0).save_pretrained(folder)
    settings = server_settings()
    settings["options"] = settings["options"] | {"lora-backend": "torch_native"}
    kinds: tuple[tuple[Projection, ...], ...] = (ALL, ("q", "v", "gate"))
    shapes = [AdapterShape(rank=RANK, scale=ALPHA / RANK, targets=targets) for targets in kinds]
    where = {
        "weights_folder": tmp_path / "weights",
        "log": tmp_path / "server.log",
        "start_s": 1500.0,
    }
    engines = adapter_engines(
        AdapterServers(
            SGLangSettings(
                folder=folder,
                adapters=shapes,
                max_length=MAX_LENGTH,
                rows=48,
                python=sglang,
                **where,
                **settings,
            )
        ),
        len(shapes),
    )
    models = [make_model(0) for _ in kinds]
    for model, targets in zip(models, kinds, strict=True):
        adapt(model, targets)
    bare, prompts = make_model(0), [[7, i, 3, 9] for i in range(4)]

    async def ask(number: int, prompt: list[int], tokens: int = 12) -> float:
        """How far the log-probabilities of a reply are from the adapted model's, or from the bare one's before that."""
        engine = engines[number]
        right = models[number] if engine.version else bare
        said = await engine.generate(prompt, Sampling(max_tokens=tokens, temperature=1.0))
        return max_error(right, prompt, said)

    async def both() -> list[float]:
        return await asyncio.gather(
            *(ask(number, prompt) for prompt in prompts for number in (0, 1))
        )

    def weights(number: int) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor)
            for name, tensor in tensors_of(models[number]).items()
            if ".lora_" in name
        ]

    async def play() -> None:
        assert max(await both()) < LOGPROB_TOLERANCE
        await engines[0].load_weights(weights(0), 1)
        assert max(await both()) < LOGPROB_TOLERANCE  # one adapter and the bare model in one batch
        long = [asyncio.create_task(ask(0, prompt, MAX_LENGTH - 8)) for prompt in prompts]
        await asyncio.sleep(0.2)
        await engines[1].load_weights(weights(1), 1)
        assert max(await both()) < LOGPROB_TOLERANCE  # the prompts are cached, for other adapters
        assert max(await asyncio.gather(*long)) < LOGPROB_TOLERANCE
        for name, half in models[0].named_parameters():
            if ".lora_B" in name:
                with torch.no_grad():
                    half.mul_(-2.0)
        await engines[0].load_weights(weights(0), 2)
        assert max(await both()) < LOGPROB_TOLERANCE
        await asyncio.gather(*engines[0].host.background)

    try:
        asyncio.run(play())
    finally:
        engines[0].close()


@pytest.mark.multirank
def test_two_policies_train_on_one_server(sglang: str, tmp_path: Path) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    settings = server_settings()
    alone = ("agents.verifier.policy", "~policies.verifier", "+engine.sleep")
    run = make_run(
        tmp_path,
        *(setting for setting in SETTINGS if not setting.startswith(alone)),
        *(f"+policies.{name}.lora={{rank: 4, alpha: 8}}" for name in ("solver", "verifier")),
        *(f"+policies.{name}.share_base=true" for name in ("solver", "verifier")),
        "policies.solver.tp=1",
        "policies.verifier.lr=1.0e-3",
        "policies.verifier.warmup_steps=0",
        "+engine.adapters=slots",
        f"engine.python={Path(sglang).absolute()}",
        f"+engine.options={as_override(settings['options'] | {'lora-backend': 'torch_native'})}",
        f"+engine.environment={as_override(settings['environment'])}",
    )
    train(run / "config.yaml")
    steps = [row for row in metrics_of(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    gaps = [
        value for row in steps for name, value in row.items() if name.endswith("/logprob_gap_max")
    ]
    assert 0 < max(gaps) <= 1e-4  # two implementations, the same adapters
    for step, row in enumerate(steps):
        assert row["policy/solver/hand_over_mb"] > 0
        assert row["policy/solver/engine_pause_s"] == 0
        trajectories = read_trajectories(
            run / "train" / "trajectories" / f"step_{step:06d}.parquet"
        )
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        assert {(turn.policy, turn.policy_version) for turn in turns} >= {("solver", step)}
    assert len(list((run / "train").rglob("solver.*.log"))) == 1
    assert not list((run / "train").rglob("verifier.*.log"))
