"""Adapters on a real SGLang server: two adapters and the base model in one batch, updates, and a training."""

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
    targets_by_adapter: list[tuple[Projection, ...]] = [ALL, ("q", "v", "gate")]
    shapes = [
        AdapterShape(rank=RANK, scale=ALPHA / RANK, targets=targets)
        for targets in targets_by_adapter
    ]
    server = server_settings()
    servers = AdapterServers(
        SGLangSettings(
            folder=folder,
            adapters=shapes,
            max_length=MAX_LENGTH,
            rows=48,
            python=sglang,
            weights_folder=tmp_path / "weights",
            log=tmp_path / "server.log",
            start_s=1500.0,
            options=server["options"] | {"lora-backend": "torch_native"},
            environment=server["environment"],
        )
    )
    engines = adapter_engines(servers, len(shapes))
    base_model = make_model(0)
    adapted_models = []
    for targets in targets_by_adapter:
        model = make_model(0)
        adapt(model, targets)
        adapted_models.append(model)
    prompts = [[7, i, 3, 9] for i in range(4)]

    async def error_of(number: int, prompt: list[int], max_tokens: int = 12) -> float:
        """Sample a reply; return its largest error of a log-probability.

        The reference is the adapted model, or the base model before the adapter's first weights.
        """
        engine = engines[number]
        model = adapted_models[number] if engine.version else base_model
        completion = await engine.generate(prompt, Sampling(max_tokens=max_tokens, temperature=1.0))
        return max_error(model, prompt, completion)

    async def largest_error() -> float:
        """Send all prompts to both adapters at once; return the largest error."""
        calls = [error_of(number, prompt) for prompt in prompts for number in (0, 1)]
        return max(await asyncio.gather(*calls))

    def adapter_weights(number: int) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor)
            for name, tensor in tensors_of(adapted_models[number]).items()
            if ".lora_" in name
        ]

    async def run() -> None:
        assert await largest_error() < LOGPROB_TOLERANCE
        await engines[0].load_weights(adapter_weights(0), 1)
        # One adapter and the base model in one batch
        assert await largest_error() < LOGPROB_TOLERANCE

        # The second adapter gets weights while the first one decodes.
        long_replies = [
            asyncio.create_task(error_of(0, prompt, MAX_LENGTH - 8)) for prompt in prompts
        ]
        await asyncio.sleep(0.2)
        await engines[1].load_weights(adapter_weights(1), 1)
        # The keys of the prompts are in the cache, but of other adapters.
        assert await largest_error() < LOGPROB_TOLERANCE
        assert max(await asyncio.gather(*long_replies)) < LOGPROB_TOLERANCE

        for name, parameter in adapted_models[0].named_parameters():
            if ".lora_B" in name:
                with torch.no_grad():
                    parameter.mul_(-2.0)
        await engines[0].load_weights(adapter_weights(0), 2)
        assert await largest_error() < LOGPROB_TOLERANCE
        await asyncio.gather(*engines[0].host.background)

    try:
        asyncio.run(run())
    finally:
        engines[0].close()


@pytest.mark.multirank
def test_two_policies_train_on_one_server(sglang: str, tmp_path: Path) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    server = server_settings()
    options = server["options"] | {"lora-backend": "torch_native"}
    # Settings of a run with one policy, and of a server that sleeps
    other_settings = ("agents.verifier.policy", "~policies.verifier", "+engine.sleep")
    settings = [setting for setting in SETTINGS if not setting.startswith(other_settings)]
    for policy in ("solver", "verifier"):
        settings.append(f"+policies.{policy}.lora={{rank: 4, alpha: 8}}")
        settings.append(f"+policies.{policy}.share_base=true")
    run = make_run(
        tmp_path,
        *settings,
        "policies.solver.tp=1",
        "policies.verifier.lr=1.0e-3",
        "policies.verifier.warmup_steps=0",
        "+engine.adapters=slots",
        f"engine.python={Path(sglang).absolute()}",
        f"+engine.options={as_override(options)}",
        f"+engine.environment={as_override(server['environment'])}",
    )
    train(run / "config.yaml")
    steps = [row for row in metrics_of(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    gaps = []
    for row in steps:
        gaps += [value for name, value in row.items() if name.endswith("/logprob_gap_max")]
    # SGLang and Megatron compute the same adapters differently.
    assert 0 < max(gaps) <= 1e-4
    for step, row in enumerate(steps):
        assert row["policy/solver/hand_over_mb"] > 0
        assert row["policy/solver/engine_pause_s"] == 0
        versions = set()
        for trajectory in read_trajectories(
            run / "train" / "trajectories" / f"step_{step:06d}.parquet"
        ):
            versions |= {(turn.policy, turn.policy_version) for turn in trajectory.turns}
        assert ("solver", step) in versions
    # Both policies have one server, whose log has the name of the first.
    assert len(list((run / "train").rglob("solver.*.log"))) == 1
    assert not list((run / "train").rglob("verifier.*.log"))
