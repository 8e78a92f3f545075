"""Adapters on SGLang's servers by name: hand-overs, versions, deaths, refusals, and the folder that is handed over."""

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
from rollout.base.processes import say
from rollout.engines import EngineConfig
from rollout.engines.adapters import AdapterEngine, adapter_engines
from rollout.engines.sglang.adapters import AdapterServers
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.fused_weights import AdapterShape
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


def adapter(targets: tuple[str, ...] = TARGETS) -> list[tuple[str, torch.Tensor]]:
    """Random adapters on the model of seed 0, by PEFT name."""
    model = make_model(0)
    adapt(model, targets)
    return [(name, tensor) for name, tensor in tensors_of(model).items() if ".lora_" in name]


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[AdapterEngine] = []

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
        made.extend(engines)
        return engines

    yield make_adapter_engines
    for engine in made:
        engine.close()


async def ask(engine: AdapterEngine, *prompt: int) -> Completion:
    return await engine.generate(list(prompt), Sampling(max_tokens=3))


async def server(engine: AdapterEngine) -> dict[str, Any]:
    """What the stand-in has been asked, and the adapters that it holds."""
    said: dict[str, Any] = await engine.host.fleet.replicas[0].client.call("/what", {})
    return said


def versions(completion: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.versions]


def test_two_adapters_are_on_one_server_under_names_with_their_versions(make: Make) -> None:
    one, other = make(shape(), shape(rank=2))

    async def play() -> None:
        assert versions(await ask(one, 1)) == [
            (0, 0, 3)
        ]  # the bare model, before anything is handed over
        await one.load_weights(adapter(), 1)
        assert versions(await ask(one, 1)) == [(1, 0, 3)]
        assert versions(await ask(other, 1)) == [(0, 0, 3)]
        await one.load_weights(adapter(), 2)
        await one.load_weights(
            adapter(), 2
        )  # the same version again, as for an engine that lost its weights
        await asyncio.gather(*one.host.background)
        assert versions(await ask(one, 1)) == [(2, 0, 3)]
        said = await server(one)
        assert [name[:5] for name in said["asked"]] == ["", "1-v1-", "", "1-v2-"]
        assert [name[:5] for name in said["adapters"]] == ["1-v2-"]  # the older ones are given up
        assert not {"/pause_generation", "/update_weights_from_disk", "/flush_cache"} & {
            *said["calls"]
        }
        words = " ".join(said["arguments"])
        assert (
            "--enable-lora --max-lora-rank 3 --lora-target-modules gate_proj q_proj v_proj --max-loras"
            in words
        )
        assert "--max-loras-per-batch 5 " in words  # two versions of each, and the bare model

    asyncio.run(play())
    assert one.starts == 1
    assert one.host is other.host


def test_a_request_ends_with_the_version_that_it_began_with_and_only_then_is_that_given_up(
    make: Make,
) -> None:
    (engine,) = make(shape())

    async def play() -> None:
        await engine.load_weights(adapter(), 1)
        running = asyncio.create_task(ask(engine, 15))
        while len((await server(engine))["asked"]) < 1:
            await asyncio.sleep(0.01)
        await engine.load_weights(adapter(), 2)
        await engine.load_weights(adapter(), 3)  # waits for no request
        assert versions(await ask(engine, 1)) == [(3, 0, 3)]
        await asyncio.gather(*engine.host.background)
        assert [name[:4] for name in (await server(engine))["adapters"]] == ["1-v1", "1-v3"]
        await engine.host.fleet.replicas[0].client.call("/free", {})
        assert versions(await running) == [(1, 0, 3)]
        await asyncio.gather(*engine.host.background)
        assert [name[:4] for name in (await server(engine))["adapters"]] == ["1-v3"]

    asyncio.run(play())


def test_a_server_that_died_holds_all_present_adapters_before_it_answers(make: Make) -> None:
    one, other = make(shape(), shape(), tell=lambda _: None)

    async def play() -> None:
        await one.load_weights(adapter(), 1)
        await other.load_weights(adapter(), 4)
        running = asyncio.create_task(ask(one, 15))
        while not (await server(one))["asked"]:
            await asyncio.sleep(0.01)
        await one.load_weights(adapter(), 2)
        pid = await pid_of(one.host.fleet.replicas[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert versions(await ask(other, 1)) == [(4, 0, 3)]
        await one.host.fleet.replicas[0].client.call("/free", {})
        assert versions(await running) == [(2, 0, 3)]  # begun again, with what the new server has
        assert sorted(name[:4] for name in (await server(one))["adapters"]) == ["1-v2", "2-v4"]

    asyncio.run(play())
    assert one.starts == 2


def test_what_a_server_refuses_is_told_and_the_version_before_stays(make: Make) -> None:
    (engine,) = make(shape())

    async def play() -> None:
        await engine.load_weights(adapter(), 1)
        there = {
            "urls": [engine.host.fleet.replicas[0].client.url],
            "key": engine.host.settings.server_key,
        }
        bare = [
            (name, torch.cat([tensor, tensor], dim=name.count(".lora_B.")))
            for name, tensor in adapter()
        ]
        (larger,) = make(shape(rank=2 * RANK), **there)
        with pytest.raises(
            EngineError,
            match=r"/load_lora_adapter: status 400: adapter 1-v2-\S+ with rank 6 is incompa",
        ):
            await larger.load_weights(bare, 2)
        assert versions(await ask(larger, 1)) == [(0, 0, 3)]
        broken = [
            (name, tensor * (float("nan") if "layers.1.mlp.gate_proj.lora_B" in name else 1))
            for name, tensor in adapter()
        ]
        with pytest.raises(
            EngineError,
            match=r"layers.1.mlp.gate_proj.lora_B.weight of version 3 has a number that is not",
        ):
            await engine.load_weights(broken, 3)
        with pytest.raises(EngineError, match=r"lora_A"):
            await engine.load_weights(adapter()[1:], 3)
        assert versions(await ask(engine, 1)) == [(1, 0, 3)]

    asyncio.run(play())


def test_a_server_without_adapters_says_so(make: Make, folder: Path, tmp_path: Path) -> None:
    from rollout.engines.sglang.engine import SGLangEngine

    plain = SGLangEngine(
        SGLangSettings(
            folder=folder,
            max_length=64,
            python=str(FAKE),
            verify=False,
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
            await engine.load_weights(adapter(), 1)

    try:
        asyncio.run(play())
    finally:
        plain.close()


def test_the_folder_is_pefts_and_makes_the_merged_models_logprobs(
    folder: Path, tmp_path: Path
) -> None:
    """What `LoraModel` of PEFT does, in plain torch: W + alpha / r · B A for every module that the folder names."""
    trained = make_model(0)
    adapt(trained, TARGETS)
    (engine,) = adapter_engines(
        AdapterServers(
            SGLangSettings(
                folder=folder,
                adapters=[shape()],
                max_length=64,
                python=str(FAKE),
                weights_folder=tmp_path,
            )
        ),
        len([shape()]),
    )
    route = asyncio.run(engine.begin_update())
    sender = make_sender(route)
    places = [Path(sender.send(iter(adapter()), version).location) for version in (1, 2, 3)]
    assert [place.exists() for place in places] == [
        False,
        True,
        True,
    ]  # one for a server that starts again
    told = json.loads((places[2] / "adapter_config.json").read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", 3, 6.0)
    assert told["target_modules"] == ["gate_proj", "q_proj", "v_proj"]
    tensors = load_file(places[2] / "adapter_model.safetensors")
    model, ids = make_model(0), torch.arange(1, 20)[None]
    names = [name for name in tensors if name.endswith(".lora_A.weight")]
    for name in names:
        module = model.get_submodule(
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        )
        delta = (
            told["lora_alpha"]
            / told["r"]
            * tensors[name.replace("lora_A", "lora_B")]
            @ tensors[name]
        )
        with torch.no_grad():
            module.weight += delta
    assert len(names) == 3 * model.config.num_hidden_layers
    with torch.no_grad():
        merged, own, bare = (m(ids).logits.log_softmax(-1) for m in (model, trained, make_model(0)))
    assert torch.allclose(merged, own, atol=1e-5)
    assert not torch.allclose(merged, bare, atol=1e-3)


@pytest.mark.parametrize(
    "targets", [("q",), ("k",), ("v", "o"), ("up", "down"), ("k", "v", "gate", "up")]
)
def test_what_sglang_would_leave_out_of_an_adapter_is_refused(
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
def test_what_sglang_computes_is_taken(folder: Path, targets: tuple[Projection, ...]) -> None:
    SGLangSettings(
        folder=folder, adapters=[shape(targets=targets)], max_length=64, python=str(FAKE)
    )


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
    return RunConfig.check(
        resolve(["experiment=demo_math", "policies.solver.tp=1", *shared, *slots, *overrides]),
        "a test",
    )


def test_policies_that_share_their_base_share_servers_too() -> None:
    assert [(t.policy, t.part) for t in list_worker_groups(config(), "GPU")] == [
        ("solver", "trainer"),
        ("solver", "engine"),
    ]
    apart = list_worker_groups(config("engine.adapters=merged"), "GPU")
    assert [(t.policy, t.part) for t in apart] == [
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
            "policies.solver: engine.adapters: slots is for policies with lora",
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
            ["+policies.verifier.own.engine.adapters=merged"],
            "policies.verifier.own.engine: share_base puts it in the engine of",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config(*overrides)
    assert "\n" not in str(refused.value)


def test_the_embedded_engine_has_no_slots() -> None:
    with pytest.raises(ValueError, match="adapters: slots needs name: sglang"):
        EngineConfig(adapters="slots")
