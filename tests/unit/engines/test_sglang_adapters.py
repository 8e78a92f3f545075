"""Adapters on SGLang's servers: updates, versions, deaths, refusals, and the adapter's folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning.worker_groups import list_worker_groups
from rollout.base.errors import EngineError
from rollout.base.terminal import say
from rollout.engines import EngineConfig, ScoredReply
from rollout.engines.adapters import AdapterEngine, adapter_engines
from rollout.engines.sglang.adapters import AdapterServers
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.adapter_weights import AdapterShape
from rollout.models.layout import Projection
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import make_sender
from tests.support.lora import ALPHA, RANK, adapt, tensors_of
from tests.support.sglang_server import pid_of
from tests.support.tiny import make_model

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
TARGETS: tuple[Projection, ...] = ("q", "v", "gate")
Make = Callable[..., list[AdapterEngine]]


def shape(rank: int = RANK, targets: tuple[Projection, ...] = TARGETS) -> AdapterShape:
    return AdapterShape(rank=rank, scale=ALPHA / RANK, targets=targets)


def adapter_tensors(targets: tuple[str, ...] = TARGETS) -> list[tuple[str, torch.Tensor]]:
    """Return random tensors of an adapter on the model of seed 0, by PEFT name."""
    model = make_model(0)
    adapt(model, targets)
    return [(name, tensor) for name, tensor in tensors_of(model).items() if ".lora_" in name]


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    all_engines: list[AdapterEngine] = []

    def make_adapter_engines(
        *shapes: AdapterShape, tell: Callable[[str], None] = say, **changed: Any
    ) -> list[AdapterEngine]:
        defaults = {
            "folder": folder,
            "max_length": 64,
            "rows": 4,
            "start_s": 60.0,
            "weights_folder": tmp_path / "weights",
            "log": tmp_path / "server.log",
            "python": str(FAKE),
        }
        settings = SGLangSettings(**(defaults | changed), adapters=shapes)
        engines = adapter_engines(AdapterServers(settings, tell=tell), len(shapes))
        all_engines.extend(engines)
        return engines

    yield make_adapter_engines
    for engine in all_engines:
        engine.close()


async def generate(engine: AdapterEngine, *prompt: int) -> Completion:
    return await engine.generate(list(prompt), Sampling(max_tokens=3))


async def server_record(engine: AdapterEngine) -> dict[str, Any]:
    """Return what the stand-in of the server has recorded: calls, and names of adapters."""
    record: dict[str, Any] = await engine.host.fleet.replicas[0].client.call("/what", {})
    return record


async def loaded_adapters(engine: AdapterEngine) -> list[str]:
    """Return number and version of the adapters that the server holds, such as "1-v3"."""
    record = await server_record(engine)
    return sorted(name.rpartition("-")[0] for name in record["adapters"])


async def wait_for_request(engine: AdapterEngine) -> None:
    """Wait until the server has got its first request."""
    while not (await server_record(engine))["asked"]:
        await asyncio.sleep(0.01)


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    """Return version, first token and end of each version span."""
    return [(span.version, span.start, span.end) for span in completion.versions]


def test_each_version_of_an_adapter_has_a_name_on_the_server(make: Make) -> None:
    first, second = make(shape(), shape(rank=2))

    async def run() -> None:
        # Before its first weights, an adapter has no effect: the request names none.
        assert spans(await generate(first, 1)) == [(0, 0, 3)]
        await first.load_weights(adapter_tensors(), 1)
        assert spans(await generate(first, 1)) == [(1, 0, 3)]
        assert spans(await generate(second, 1)) == [(0, 0, 3)]
        await first.load_weights(adapter_tensors(), 2)
        # An engine that has lost its weights gets the same version again.
        await first.load_weights(adapter_tensors(), 2)
        await asyncio.gather(*first.host.background)
        assert spans(await generate(first, 1)) == [(2, 0, 3)]
        assert await loaded_adapters(first) == ["1-v2"]

        record = await server_record(first)
        assert [name[:5] for name in record["asked"]] == ["", "1-v1-", "", "1-v2-"]
        pauses = {"/pause_generation", "/update_weights_from_disk", "/flush_cache"}
        assert not pauses & set(record["calls"])
        arguments = " ".join(record["arguments"])
        assert "--enable-lora --max-lora-rank 3 " in arguments
        assert " --lora-target-modules gate_proj q_proj v_proj " in arguments
        # Two versions of each adapter, and the bare model.
        assert "--max-loras-per-batch 5 " in arguments

    asyncio.run(run())
    assert first.starts == 1
    assert first.host is second.host


def test_a_version_is_unloaded_when_its_last_request_has_ended(make: Make) -> None:
    (engine,) = make(shape())

    async def play() -> None:
        await engine.load_weights(adapter_tensors(), 1)
        running = asyncio.create_task(generate(engine, 15))
        await wait_for_request(engine)
        await engine.load_weights(adapter_tensors(), 2)
        await engine.load_weights(adapter_tensors(), 3)  # does not wait for the request
        assert spans(await generate(engine, 1)) == [(3, 0, 3)]
        await asyncio.gather(*engine.host.background)
        assert await loaded_adapters(engine) == ["1-v1", "1-v3"]
        await engine.host.fleet.replicas[0].client.call("/free", {})
        assert spans(await running) == [(1, 0, 3)]
        await asyncio.gather(*engine.host.background)
        assert await loaded_adapters(engine) == ["1-v3"]

    asyncio.run(play())


def test_a_version_stays_loaded_until_its_replies_are_scored(make: Make) -> None:
    (engine,) = make(shape())
    blocked = ScoredReply(prompt_ids=[15], completion_ids=[7, 8])
    other = ScoredReply(prompt_ids=[1], completion_ids=[9])

    async def play() -> None:
        await engine.load_weights(adapter_tensors(), 1)
        running = asyncio.create_task(engine.score([blocked, other]))
        await wait_for_request(engine)
        await engine.load_weights(adapter_tensors(), 2)
        assert not engine.host.background  # no request to unload the version
        assert await loaded_adapters(engine) == ["1-v1", "1-v2"]
        await engine.host.fleet.replicas[0].client.call("/free", {})
        assert await running == [[-0.25, -0.25], [-0.25]]
        await asyncio.gather(*engine.host.background)
        assert await loaded_adapters(engine) == ["1-v2"]

    asyncio.run(play())


def test_a_request_that_ends_during_an_update_does_not_unload_the_new_version(make: Make) -> None:
    (engine,) = make(shape(), replicas=2)
    on_first_server = Sampling(max_tokens=3, session="task")

    async def play() -> None:
        await engine.load_weights(adapter_tensors(), 1)
        running = asyncio.create_task(engine.generate([15], on_first_server))
        await wait_for_request(engine)
        first, second = engine.host.fleet.replicas
        second_pid = await pid_of(second)
        assert second_pid is not None
        os.kill(second_pid, signal.SIGSTOP)
        update = asyncio.create_task(engine.load_weights(adapter_tensors(), 2))
        while "1-v2" not in await loaded_adapters(engine):
            await asyncio.sleep(0.01)
        # The second server does not load the version yet, so the update is still under way.
        await first.client.call("/free", {})
        assert spans(await running) == [(1, 0, 3)]
        assert not update.done()
        os.kill(second_pid, signal.SIGCONT)
        await update
        await asyncio.gather(*engine.host.background)
        assert await loaded_adapters(engine) == ["1-v2"]
        assert spans(await engine.generate([1], on_first_server)) == [(2, 0, 3)]

    asyncio.run(play())


def test_a_restarted_server_gets_all_present_adapters_before_it_answers(make: Make) -> None:
    first, second = make(shape(), shape(), tell=lambda line: None)

    async def run() -> None:
        await first.load_weights(adapter_tensors(), 1)
        await second.load_weights(adapter_tensors(), 4)
        running = asyncio.create_task(generate(first, 15))
        await wait_for_request(first)
        await first.load_weights(adapter_tensors(), 2)
        pid = await pid_of(first.host.fleet.replicas[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert spans(await generate(second, 1)) == [(4, 0, 3)]
        await first.host.fleet.replicas[0].client.call("/free", {})
        # The request began again, with the version that the new server has.
        assert spans(await running) == [(2, 0, 3)]
        assert await loaded_adapters(first) == ["1-v2", "2-v4"]

    asyncio.run(run())
    assert first.starts == 2


def test_a_failed_update_leaves_the_version_before(make: Make) -> None:
    (engine,) = make(shape())

    async def play() -> None:
        await engine.load_weights(adapter_tensors(), 1)

        # The server was started for adapters of a smaller rank.
        (larger,) = make(
            shape(rank=2 * RANK),
            urls=[engine.host.fleet.replicas[0].client.url],
            key=engine.host.settings.server_key,
        )
        larger_tensors = []
        for name, tensor in adapter_tensors():
            rank_dim = 1 if ".lora_B." in name else 0
            larger_tensors.append((name, torch.cat([tensor, tensor], dim=rank_dim)))
        message = r"/load_lora_adapter: status 400: adapter 1-v2-\S+ with rank 6 is incompa"
        with pytest.raises(EngineError, match=message):
            await larger.load_weights(larger_tensors, 2)
        assert spans(await generate(larger, 1)) == [(0, 0, 3)]

        not_finite = dict(adapter_tensors())
        (broken_name,) = (name for name in not_finite if "layers.1.mlp.gate_proj.lora_B" in name)
        not_finite[broken_name] = torch.full_like(not_finite[broken_name], torch.nan)
        message = r"layers.1.mlp.gate_proj.lora_B.weight of version 3 has a number that is not"
        with pytest.raises(EngineError, match=message):
            await engine.load_weights(not_finite.items(), 3)
        with pytest.raises(EngineError, match=r"lora_A"):
            await engine.load_weights(adapter_tensors()[1:], 3)
        assert spans(await generate(engine, 1)) == [(1, 0, 3)]

    asyncio.run(play())


def test_a_server_without_adapters_refuses_them(make: Make, folder: Path, tmp_path: Path) -> None:
    plain = SGLangEngine(
        SGLangSettings(
            folder=folder,
            max_length=64,
            python=str(FAKE),
            compare_servers=False,
            log=tmp_path / "plain.log",
            start_s=60.0,
        )
    )

    async def play() -> None:
        await plain.generate([1], Sampling(max_tokens=1))
        (engine,) = make(
            shape(), urls=[plain.fleet.replicas[0].client.url], key=plain.settings.server_key
        )
        with pytest.raises(
            EngineError, match=r"status 400: LoRA is not enabled. Please set `--enable-lora`"
        ):
            await engine.load_weights(adapter_tensors(), 1)

    try:
        asyncio.run(play())
    finally:
        plain.close()


def test_the_adapters_folder_is_read_by_peft_as_the_trained_model(
    folder: Path, tmp_path: Path
) -> None:
    """Merge the folder as PEFT's `LoraModel` does: W + alpha / r B A for every module in it."""
    trained = make_model(0)
    adapt(trained, TARGETS)
    settings = SGLangSettings(
        folder=folder,
        adapters=[shape()],
        max_length=64,
        python=str(FAKE),
        weights_folder=tmp_path,
    )
    (engine,) = adapter_engines(AdapterServers(settings), 1)
    sender = make_sender(asyncio.run(engine.begin_update()))
    folders = [
        Path(sender.send(iter(adapter_tensors()), version).location) for version in (1, 2, 3)
    ]
    # The folder of the version before stays, for a server that starts again.
    assert [path.exists() for path in folders] == [False, True, True]

    config = json.loads((folders[2] / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == 3
    assert config["lora_alpha"] == 6.0
    assert config["target_modules"] == ["gate_proj", "q_proj", "v_proj"]

    merged = make_model(0)
    tensors = load_file(folders[2] / "adapter_model.safetensors")
    a_names = [name for name in tensors if name.endswith(".lora_A.weight")]
    assert len(a_names) == 3 * merged.config.num_hidden_layers
    scale = config["lora_alpha"] / config["r"]
    for a_name in a_names:
        module_name = a_name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[a_name.replace("lora_A", "lora_B")]
        with torch.no_grad():
            merged.get_submodule(module_name).weight += scale * b @ tensors[a_name]

    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        merged_logprobs = merged(ids).logits.log_softmax(-1)
        trained_logprobs = trained(ids).logits.log_softmax(-1)
        base_logprobs = make_model(0)(ids).logits.log_softmax(-1)
    assert torch.allclose(merged_logprobs, trained_logprobs, atol=1e-5)
    assert not torch.allclose(merged_logprobs, base_logprobs, atol=1e-3)


@pytest.mark.parametrize(
    "targets", [("q",), ("k",), ("v", "o"), ("up", "down"), ("k", "v", "gate", "up")]
)
def test_targets_that_sglang_would_leave_out_are_refused(
    folder: Path, targets: tuple[Projection, ...]
) -> None:
    with pytest.raises(
        EngineError,
        match=r"lora.targets .*: SGLang takes an adapter of q, k or v only with q and v both",
    ):
        SGLangSettings(
            folder=folder, adapters=[shape(targets=targets)], max_length=64, python=str(FAKE)
        )


@pytest.mark.parametrize(
    "targets",
    [("q", "v"), ("o",), ("gate",), ("down",), ("q", "k", "v", "o", "gate", "up", "down")],
)
def test_targets_that_sglang_computes_are_accepted(
    folder: Path, targets: tuple[Projection, ...]
) -> None:
    settings = SGLangSettings(
        folder=folder, adapters=[shape(targets=targets)], max_length=64, python=str(FAKE)
    )
    assert [adapter.targets for adapter in settings.adapters] == [targets]


def config(*overrides: str) -> RunConfig:
    shared = [
        f"+policies.{name}.{key}"
        for name in ("solver", "verifier")
        for key in ("lora={rank: 4, alpha: 8}", "share_base=true")
    ]
    slots = [
        "engine=sglang",
        f"engine.python={FAKE}",
        "+engine.adapters=slots",
        "cluster.pool=shared",
    ]
    return RunConfig.from_values(
        resolve(["experiment=demo_math", "policies.solver.tp=1", *shared, *slots, *overrides]),
        "a test",
    )


def test_policies_that_share_their_base_share_servers_too() -> None:
    shared = list_worker_groups(config(), "GPU")
    assert [(workers.policy, workers.part) for workers in shared] == [
        ("solver", "trainer"),
        ("solver", "engine"),
    ]
    merged = list_worker_groups(config("engine.adapters=merged"), "GPU")
    assert [(workers.policy, workers.part) for workers in merged] == [
        ("solver", "trainer"),
        ("solver", "engine"),
        ("verifier", "engine"),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                "~policies.solver.lora",
                "~policies.solver.share_base",
                "~policies.verifier.share_base",
            ],
            "policies.solver: engine.adapters: slots is for policies with lora; add policies.solver.lora, or",
        ),
        (
            ["+policies.verifier.lora.targets=[q]"],
            r"policies.verifier: engine.adapters: slots with lora.targets q: SGLang",
        ),
        (
            ["+engine.sleep=true"],
            "adapters: slots needs name: sglang and transport: disk, without sleep and members",
        ),
        (["+engine.transport=tensor"], "adapters: slots needs name: sglang and transport: disk"),
        (["engine.adapters=slot"], r"engine.adapters.*merged"),
        (
            ["+policies.verifier.overrides.engine.adapters=merged"],
            "policies.verifier.overrides.engine: share_base puts the policy into the engine of",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused_in_one_line(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config(*overrides)
    assert "\n" not in str(refused.value)


def test_the_embedded_engine_has_no_slots() -> None:
    with pytest.raises(ValueError, match="adapters: slots needs name: sglang"):
        EngineConfig(adapters="slots")
