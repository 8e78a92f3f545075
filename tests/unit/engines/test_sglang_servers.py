"""Where the SGLang engine's servers run: their arguments, keys and nodes, and what cannot serve."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rollout.base.errors import EngineError
from rollout.engines.sglang import fleet
from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.replica import Replica, owned_replica
from rollout.engines.sglang.server import Server, server_arguments
from rollout.engines.sglang.settings import SGLangSettings
from tests.support.sglang_server import pid_of
from tests.unit.engines.test_sglang_engine import ask, tensors

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
Make = Callable[..., SGLangEngine]


def test_the_server_says_what_it_can_compute(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model here"):
        SGLangEngine(SGLangSettings(folder=tmp_path, max_length=64, python=str(FAKE)))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 9}')
    engine = SGLangEngine(SGLangSettings(folder=tmp_path, max_length=64, python=str(FAKE)))
    with pytest.raises(EngineError, match=r"token ids outside 0\.\.8"):
        asyncio.run(ask(engine, [9]))


def test_what_cannot_serve_is_refused_at_once(folder: Path, make: Make) -> None:
    with pytest.raises(
        EngineError, match=r"engine.python: no interpreter at /nowhere; see requirements/sglang.txt"
    ):
        SGLangEngine(SGLangSettings(folder=folder, max_length=64, python="/nowhere"))
    with pytest.raises(
        EngineError, match=r"https://example.org is not on this machine; give the servers' key"
    ):
        SGLangEngine(SGLangSettings(folder=folder, max_length=64, urls=["https://example.org"]))
    with pytest.raises(
        EngineError, match="sglang has no transport 'shared'; known: disk, tensor, distributed"
    ):
        make(transport="shared")
    with pytest.raises(EngineError, match="transport 'changed' was removed; use disk"):
        make(transport="changed")
    with pytest.raises(
        EngineError,
        match=r"weights go through a folder that both machines see: set engine.weights_f",
    ):
        SGLangEngine(
            SGLangSettings(folder=folder, max_length=64, urls=["https://example.org"], key="k")
        )
    with pytest.raises(
        EngineError, match=r"engine.options: tp-size is not to be given .*; set engine.tp instead"
    ):
        make(options={"tp_size": 2})
    with pytest.raises(
        EngineError,
        match=r"engine.options: nnodes is not to be given .*; set engine.replicas instead",
    ):
        make(options={"nnodes": 2})
    with pytest.raises(
        EngineError,
        match=r"engine.options: port is not to be given to the servers; it is chosen here",
    ):
        make(options={"port": 30000})
    server = SGLangEngine(
        SGLangSettings(
            folder=folder, max_length=64, urls=["http://127.0.0.1:9"], start_s=0.1, restarts=0
        )
    )
    with pytest.raises(EngineError, match=r"SGLang at http://127.0.0.1:9: not ready within 0.1 s"):
        asyncio.run(ask(server, [1]))


def test_arguments_are_the_servers_own(folder: Path, tmp_path: Path) -> None:
    options = {
        "mem-fraction-static": 0.8,
        "log-level": "error",
        "disable-cuda-graph": True,
        "skip-server-warmup": None,
    }
    words = server_arguments(
        SGLangSettings(folder=folder, tp=2, max_length=64, rows=4, options=options)
    )
    assert " ".join(words) == (
        f"--model-path {folder} --tp-size 2 --context-length 70 --max-running-requests 4 --skip-tokenizer-init "
        "--log-level error --incremental-streaming-output --mem-fraction-static 0.8 --disable-cuda-graph"
    )
    graphs = {"cuda-graph-config": {"decode": {"backend": "full", "max_bs": 64}}}
    assert server_arguments(SGLangSettings(folder=folder, max_length=64, options=graphs))[-2:] == [
        "--cuda-graph-config",
        '{"decode": {"backend": "full", "max_bs": 64}}',
    ]
    silent = Server(str(FAKE), [], str(tmp_path / "log"), {})
    assert silent.end_reason() == "the server ended"  # it was never started


def test_a_context_may_be_filled_to_the_models_last_position(folder: Path) -> None:
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    filled = SGLangSettings(folder=folder, max_length=longest).server_environment
    # SGLang leaves some tokens of its context empty, and would refuse a context so near the end
    assert filled == {"OMP_NUM_THREADS": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    longer = SGLangSettings(folder=folder, max_length=longest + 1).server_environment
    assert longer == {"OMP_NUM_THREADS": "1"}


def test_a_server_that_other_nodes_reach_is_told_its_address_and_a_key_in_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("no_proxy", "example.org")
    words = server_arguments(SGLangSettings(folder=folder, tp=2, max_length=64, rows=4))
    server = Server(
        str(FAKE),
        words,
        str(tmp_path / "sglang.0.log"),
        {"OMP_NUM_THREADS": "3"},
        "8" * 64,
        multi_node=True,
    )
    url = server.start(["4", "6"])
    try:
        said = asyncio.run(asked(url, "8" * 64))["arguments"]
        environment = Path(f"/proc/{server.pid()}/environ").read_text().split("\0")
    finally:
        server.stop()
    key = tmp_path / "sglang.0.key.yaml"
    assert said == [
        *words,
        "--config",
        str(key),
        "--host",
        "127.0.0.1",
        "--port",
        url.rpartition(":")[2],
    ]
    assert (key.stat().st_mode & 0o777, key.read_text()) == (0o600, f'api-key: "{"8" * 64}"\n')
    own = {
        "CUDA_VISIBLE_DEVICES=4,6",
        "GLOO_SOCKET_IFNAME=lo",
        "NCCL_SOCKET_IFNAME=lo",
        "OMP_NUM_THREADS=3",
    }
    own |= {
        "NO_PROXY=example.org,127.0.0.1",
        "no_proxy=example.org,127.0.0.1",
    }  # to which it sends its key
    assert own <= set(environment)
    assert not [entry for entry in environment if entry.startswith(("PYTHONPATH=", "PYTORCH_"))]


def test_a_share_of_a_gpu_is_of_all_its_memory_whoever_is_on_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes its part of what is free when it starts: 0.4 of a GPU is 0.5 of what another has left of it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor last; do :; done\n[ $last = 3,5 ] && printf '80000, 79000\\n80000, 64000\\n'"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = SGLangSettings(
        folder=folder, max_length=64, options={"mem_fraction_static": 0.4}, shares_gpus=True
    )
    server = owned_replica(replace(settings, python=str(FAKE), log=tmp_path / "sglang.log"), 0).host
    assert server.memory_share == 0.4
    assert replace(settings, shares_gpus=False).memory_share is None
    assert server.memory_arguments(["3", "5"]) == [
        "--mem-fraction-static",
        "0.500",
    ]  # of the fuller one
    url = server.start(["3", "5"])
    try:
        said = asyncio.run(asked(url, server.key))["arguments"]
    finally:
        server.stop()
    assert [said[n + 1] for n, word in enumerate(said) if word == "--mem-fraction-static"] == [
        "0.4",
        "0.500",
    ]
    server.memory_share = 0.9
    assert server.memory_arguments(["3", "5"]) == [
        "--mem-fraction-static",
        "0.950",
    ]  # something stays for what it computes
    assert server.memory_arguments(["4"]) == []  # nobody knows that one
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert server.memory_arguments(["3"]) == []


def test_a_server_on_this_machine_asks_for_a_key_too(make: Make) -> None:
    """Whoever is on the machine could give it weights, and pickles to load."""
    engine = make()

    async def refused(key: str | None) -> None:
        client = SGLangClient(
            engine.fleet.replicas[0].client.url, timeout_s=20, connections=1, key=key
        )
        with pytest.raises(EngineError, match="/update_weights_from_tensor: status 401"):
            await client.call("/update_weights_from_tensor", {})

    async def play() -> None:
        assert len((await ask(engine, [1])).token_ids) == 3
        await refused(None)
        await refused("guessed")
        pid = await pid_of(engine.fleet.replicas[0])
        assert engine.settings.server_key not in Path(f"/proc/{pid}/cmdline").read_text()

    asyncio.run(play())
    assert [
        file.stat().st_mode & 0o777 for file in Path(engine.settings.log).parent.glob("*.key.yaml")
    ] == [0o600]


async def asked(url: str, key: str | None = None) -> dict[str, Any]:
    """What the stand-in says of itself, when it is up."""
    client = SGLangClient(url, timeout_s=20, connections=1, key=key)
    while not await client.up():
        await asyncio.sleep(0.05)
    found: dict[str, Any] = await client.call("/arguments", {})
    return found


def test_a_replica_and_its_fleet_are_shown_without_the_key(folder: Path) -> None:
    engine = SGLangEngine(
        SGLangSettings(folder=folder, max_length=64, urls=["http://127.0.0.1:1"], key="hush")
    )
    assert "hush" not in f"{engine.fleet.replicas!r} {engine.fleet!r}"


@pytest.mark.slow
def test_where_ray_runs_a_server_ends_with_its_actor_and_closing_again_does_nothing(
    make: Make, running_ray: None
) -> None:
    engines = [make(), make()]

    async def play(engine: SGLangEngine) -> int:
        await ask(engine, [1])
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        return pid

    pids = [asyncio.run(play(engine)) for engine in engines]
    ray.kill(engines[1].fleet.replicas[0].host)
    for engine in engines * 2:
        engine.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a server outlives its actor"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_without_a_node_leaves_where_another_goes_on(
    make: Make, running_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is lost and Ray has no other: here, none with the resource that its next actor asks for."""
    monkeypatch.setattr(fleet, "_ROOM_S", 1.0)
    told: list[str] = []
    engine = make(replicas=2, tell=told.append)

    async def play() -> None:
        await engine.load_weights(tensors(), 1)
        stays, lost = engine.fleet.replicas
        own, gone = {await pid_of(stays)}, await pid_of(lost)
        nowhere = ray.remote(num_cpus=0)(Server).options(resources={"gone": 1})
        lost.actors = lambda: [nowhere.remote("python", [], "log", {})]
        ray.kill(lost.host)
        while Path(f"/proc/{gone}").exists():  # until then it answers
            await asyncio.sleep(0.05)
        said = await asyncio.gather(*(ask(engine, [n + 20], f"session {n}") for n in range(12)))
        assert {completion.token_ids[0] for completion in said} == own
        await engine.load_weights(tensors(), 2)
        assert engine.fleet.replicas == [stays]

    asyncio.run(play())
    assert told[-1].endswith(
        "gone with its actor; no node has had room for another within 1 s; 1 servers"
    )


def test_servers_on_one_gpu_start_one_after_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seats 0 and 1 of one engine, seat 1 of another: the servers with a seat in common never start together."""
    said: list[str] = []

    async def starts(replica: Replica, name: str) -> None:
        async def answering(_: float) -> None:
            said.append(f"{name} starts")
            await asyncio.sleep(0)
            said.append(f"{name} answers")

        monkeypatch.setattr(replica, "_wait_until_up", answering)
        await replica.wait(1.0)

    async def play(*seats: Sequence[int]) -> list[str]:
        said.clear()
        settings = SGLangSettings(folder=folder, max_length=64)
        replicas = [Replica(settings, seats=own, url="http://127.0.0.1:1") for own in seats]
        await asyncio.gather(*(starts(replica, str(n)) for n, replica in enumerate(replicas)))
        return list(said)

    alone = ["0 starts", "0 answers", "1 starts", "1 answers"]
    assert asyncio.run(play((0, 1), (1,))) == alone
    assert asyncio.run(play((0,), (0,))) == alone
    assert asyncio.run(play((0,), (1,))) == ["0 starts", "1 starts", "0 answers", "1 answers"]
    assert asyncio.run(play((), ())) == ["0 starts", "1 starts", "0 answers", "1 answers"]
