"""Servers of the SGLang engine: their arguments, keys, nodes and GPUs, and refused settings."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import ray

from rollout.base.errors import EngineError
from rollout.base.yaml_files import read_yaml
from rollout.engines.sglang import fleet
from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.replica import Replica, owned_replica
from rollout.engines.sglang.server import Server, server_arguments
from rollout.engines.sglang.settings import SGLangSettings
from tests.support.sglang_server import pid_of
from tests.unit.engines.test_sglang_engine import generate, tensors

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
Make = Callable[..., SGLangEngine]


def test_the_vocabulary_is_read_from_the_models_config(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model here"):
        SGLangEngine(SGLangSettings(folder=tmp_path, max_length=64, python=str(FAKE)))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 9}')
    engine = SGLangEngine(SGLangSettings(folder=tmp_path, max_length=64, python=str(FAKE)))
    with pytest.raises(EngineError, match=r"token ids outside 0\.\.8"):
        asyncio.run(generate(engine, [9]))


def test_settings_that_cannot_work_are_refused(folder: Path, make: Make) -> None:
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
        match=r"engine.options: port is not to be given to the servers; the engine sets it",
    ):
        make(options={"port": 30000})
    server = SGLangEngine(
        SGLangSettings(
            folder=folder, max_length=64, urls=["http://127.0.0.1:9"], start_s=0.1, restarts=0
        )
    )
    with pytest.raises(EngineError, match=r"SGLang at http://127.0.0.1:9: not ready within 0.1 s"):
        asyncio.run(generate(server, [1]))


def test_a_file_of_members_may_have_comments_and_empty_lines(folder: Path, tmp_path: Path) -> None:
    members = tmp_path / "members"
    members.write_text("# of job 7\n\nhttp://127.0.0.1:1/\n  # gone: http://127.0.0.1:2\n")
    settings = SGLangSettings(folder=folder, max_length=64, members=members)
    assert settings.read_members() == ["http://127.0.0.1:1"]


def test_options_replace_default_arguments(folder: Path, tmp_path: Path) -> None:
    options = {
        "mem-fraction-static": 0.8,
        "log-level": "error",
        "disable-cuda-graph": True,
        "skip-server-warmup": None,
    }
    arguments = server_arguments(
        SGLangSettings(folder=folder, tp=2, max_length=64, rows=4, options=options)
    )
    assert " ".join(arguments) == (
        f"--model-path {folder} --tp-size 2 --context-length 70 --max-running-requests 4 --skip-tokenizer-init "
        "--log-level error --incremental-streaming-output --mem-fraction-static 0.8 --disable-cuda-graph"
    )
    graphs = {"cuda-graph-config": {"decode": {"backend": "full", "max_bs": 64}}}
    assert server_arguments(SGLangSettings(folder=folder, max_length=64, options=graphs))[-2:] == [
        "--cuda-graph-config",
        '{"decode": {"backend": "full", "max_bs": 64}}',
    ]
    never_started = Server(str(FAKE), [], str(tmp_path / "log"), {})
    assert never_started.end_reason() == "the server ended"


def test_a_context_may_be_filled_to_the_models_last_position(folder: Path) -> None:
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    # SGLang leaves some tokens of its context empty, so the context is longer than the model's.
    environment = SGLangSettings(folder=folder, max_length=positions).server_environment
    assert environment == {
        "OMP_NUM_THREADS": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    environment = SGLangSettings(folder=folder, max_length=positions + 1).server_environment
    assert environment == {"OMP_NUM_THREADS": "1"}


def test_a_server_for_other_nodes_gets_its_address_and_a_key_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("no_proxy", "example.org")
    key = "8" * 64
    arguments = server_arguments(SGLangSettings(folder=folder, tp=2, max_length=64, rows=4))
    server = Server(
        python=str(FAKE),
        arguments=arguments,
        log=str(tmp_path / "sglang.0.log"),
        environment={"OMP_NUM_THREADS": "3"},
        key=key,
        multi_node=True,
    )
    url = server.start(["4", "6"])
    try:
        received = asyncio.run(received_arguments(url, key))
        environment = Path(f"/proc/{server.pid()}/environ").read_text().split("\0")
    finally:
        server.stop()
    key_file = tmp_path / "sglang.0.key.yaml"
    assert received == [
        *arguments,
        "--config",
        str(key_file),
        "--host",
        "127.0.0.1",
        "--port",
        url.rpartition(":")[2],
    ]
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert key_file.read_text() == f'api-key: "{key}"\n'
    expected_variables = {
        "CUDA_VISIBLE_DEVICES=4,6",
        "GLOO_SOCKET_IFNAME=lo",
        "NCCL_SOCKET_IFNAME=lo",
        "OMP_NUM_THREADS=3",
        # The server sends requests with its key to itself, which no proxy may see.
        "NO_PROXY=example.org,127.0.0.1",
        "no_proxy=example.org,127.0.0.1",
    }
    assert expected_variables <= set(environment)
    assert not [entry for entry in environment if entry.startswith(("PYTHONPATH=", "PYTORCH_"))]


def test_a_share_of_the_whole_memory_is_converted_to_one_of_the_free_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a server with a share of 0.4 on a GPU of which 0.8 is free: SGLang gets 0.5."""
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        "[ $last = 3,5 ] && printf '80000, 79000\\n80000, 64000\\n'"
    )
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = SGLangSettings(
        folder=folder, max_length=64, options={"mem_fraction_static": 0.4}, shares_gpus=True
    )
    server = owned_replica(replace(settings, python=str(FAKE), log=tmp_path / "sglang.log"), 0).host
    assert server.memory_share == 0.4
    assert replace(settings, shares_gpus=False).memory_share is None
    # GPU 5 has less free memory than GPU 3.
    assert server.memory_arguments(["3", "5"]) == ["--mem-fraction-static", "0.500"]
    url = server.start(["3", "5"])
    try:
        received = asyncio.run(received_arguments(url, server.key))
    finally:
        server.stop()
    fractions = [value for name, value in pairwise(received) if name == "--mem-fraction-static"]
    assert fractions == ["0.4", "0.500"]  # the last one counts

    # Some memory stays for activations.
    server.memory_share = 0.9
    assert server.memory_arguments(["3", "5"]) == ["--mem-fraction-static", "0.950"]
    # nvidia-smi does not know GPU 4, or there is no nvidia-smi.
    assert server.memory_arguments(["4"]) == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert server.memory_arguments(["3"]) == []


def test_a_key_may_have_quotes_and_backslashes(tmp_path: Path) -> None:
    key = 'a"b\\n#c: d'
    log = str(tmp_path / "sglang.log")
    server = Server(python=str(FAKE), arguments=(), log=log, environment={}, key=key)
    option, file = server._key_arguments()
    assert option == "--config"
    assert read_yaml(Path(file)) == {"api-key": key}


def test_a_server_on_this_machine_asks_for_a_key_too(make: Make) -> None:
    """Send weights, which may be pickles, without the key and with a wrong one."""
    engine = make()

    async def check_refused(key: str | None) -> None:
        client = SGLangClient(
            engine.fleet.replicas[0].client.url, timeout_s=20, connections=1, key=key
        )
        with pytest.raises(EngineError, match="/update_weights_from_tensor: status 401"):
            await client.call("/update_weights_from_tensor", {})

    async def play() -> None:
        assert len((await generate(engine, [1])).token_ids) == 3
        await check_refused(None)
        await check_refused("guessed")
        pid = await pid_of(engine.fleet.replicas[0])
        assert engine.settings.server_key not in Path(f"/proc/{pid}/cmdline").read_text()

    asyncio.run(play())
    (key_file,) = Path(engine.settings.log).parent.glob("*.key.yaml")
    assert key_file.stat().st_mode & 0o777 == 0o600


async def received_arguments(url: str, key: str | None) -> list[str]:
    """Return the arguments that the stand-in of a server was started with, once it is up."""
    client = SGLangClient(url, timeout_s=20, connections=1, key=key)
    while not await client.up():
        await asyncio.sleep(0.05)
    answer = await client.call("/arguments", {})
    arguments: list[str] = answer["arguments"]
    return arguments


def test_the_key_is_not_in_the_representation_of_replicas(folder: Path) -> None:
    engine = SGLangEngine(
        SGLangSettings(folder=folder, max_length=64, urls=["http://127.0.0.1:1"], key="hush")
    )
    assert "hush" not in f"{engine.fleet.replicas!r} {engine.fleet!r}"


@pytest.mark.slow
def test_a_server_in_a_ray_actor_ends_with_the_actor(make: Make, running_ray: None) -> None:
    engines = [make(), make()]

    async def play(engine: SGLangEngine) -> int:
        await generate(engine, [1])
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        return pid

    pids = [asyncio.run(play(engine)) for engine in engines]
    ray.kill(engines[1].fleet.replicas[0].host)
    for engine in engines * 2:  # a second call of close has no effect
        engine.close()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a server outlives its actor"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_ray_has_no_node_for_leaves(
    make: Make, running_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the next actor of a server request a resource that no node has."""
    monkeypatch.setattr(fleet, "_NODE_TIMEOUT_S", 1.0)
    lines: list[str] = []
    engine = make(replicas=2, tell=lines.append)

    async def play() -> None:
        await engine.load_weights(tensors(), 1)
        remaining, lost = engine.fleet.replicas
        remaining_pid = await pid_of(remaining)
        lost_pid = await pid_of(lost)
        unschedulable = ray.remote(num_cpus=0)(Server).options(resources={"gone": 1})
        lost.make_actors = lambda: [unschedulable.remote("python", [], "log", {})]
        ray.kill(lost.host)
        while Path(f"/proc/{lost_pid}").exists():  # until then it answers
            await asyncio.sleep(0.05)
        completions = await asyncio.gather(
            *(generate(engine, [n + 20], f"session {n}") for n in range(12))
        )
        # The token of a server is its process id.
        assert {completion.token_ids[0] for completion in completions} == {remaining_pid}
        await engine.load_weights(tensors(), 2)
        assert engine.fleet.replicas == [remaining]

    asyncio.run(play())
    assert lines[-1].endswith(
        "gone with its actor; no node has had room for another server within 1 s; 1 servers"
    )


@pytest.mark.parametrize("again", [False, True], ids=["first start", "restart"])
def test_servers_on_one_gpu_start_one_after_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    settings = SGLangSettings(folder=folder, max_length=64)

    async def start(replica: Replica, name: str, events: list[str]) -> None:
        async def start_process(_: float | None = None) -> None:
            events.append(f"{name} starts")

        async def wait_until_up(_: float) -> None:
            await asyncio.sleep(0)
            events.append(f"{name} answers")

        monkeypatch.setattr(replica, "start", start_process)
        monkeypatch.setattr(replica, "_wait_until_up", wait_until_up)
        if again:
            await replica.start_again(1.0, None)
        else:
            await replica.wait(1.0)

    async def start_both(first_gpus: Sequence[int], second_gpus: Sequence[int]) -> list[str]:
        """Start two servers; return their starts and first answers in order."""
        events: list[str] = []
        first = Replica(settings, shared_gpus=first_gpus)
        second = Replica(settings, shared_gpus=second_gpus)
        await asyncio.gather(start(first, "first", events), start(second, "second", events))
        return events

    one_by_one = ["first starts", "first answers", "second starts", "second answers"]
    together = ["first starts", "second starts", "first answers", "second answers"]
    assert asyncio.run(start_both((0, 1), (1,))) == one_by_one
    assert asyncio.run(start_both((0,), (0,))) == one_by_one
    assert asyncio.run(start_both((0,), (1,))) == together
    assert asyncio.run(start_both((), ())) == together
