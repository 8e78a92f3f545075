"""What the SGLang engine does around its servers; `make test-sglang` runs it on real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.engines.sglang import fleet
from mcore_mas.rollout.engines.sglang.client import SGLangClient, StreamedReply, body_of, completion_of
from mcore_mas.rollout.engines.sglang.engine import SGLangEngine
from mcore_mas.rollout.engines.sglang.server import Replica, Server, server_arguments
from mcore_mas.rollout.engines.sglang.settings import SGLangSettings
from mcore_mas.rollout.records.trajectory import Completion, Sampling
from mcore_mas.rollout.sync import make_sender
from tests.support.slotted_sglang import slotted_server
from tests.support.tiny import make_model

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
Make = Callable[..., SGLangEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[SGLangEngine] = []

    def engine(**settings: Any) -> SGLangEngine:
        where = {"weights_folder": tmp_path / "weights", "log": tmp_path / "server.log"}
        settings = {"verify": False} | where | settings  # these servers have no weights
        made.append(SGLangEngine(folder, max_length=64, rows=4, python=str(FAKE), start_s=60.0, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in make_model(1).state_dict().items() if name != "lm_head.weight"]


async def ask(engine: SGLangEngine, prompt: list[int], session: str = "") -> Completion:
    return await engine.generate(prompt, Sampling(max_tokens=3, session=session))


def test_sessions_stay_with_their_replica(make: Make) -> None:
    engine = make(replicas=2)

    async def play() -> tuple[list[int], list[int], list[int]]:
        sessions = [await ask(engine, [i, 5], f"task/{i}") for i in range(16)]
        again = [await ask(engine, [i, 5, 6], f"task/{i}") for i in range(16)]
        alone = await asyncio.gather(*(ask(engine, [7, 8]) for _ in range(4)))
        return tuple([completion.token_ids[0] for completion in part] for part in (sessions, again, alone))

    sessions, again, alone = asyncio.run(play())
    assert sessions == again
    assert len(set(sessions)) == 2
    assert len(set(alone)) == 1  # equal prompts meet


def test_a_session_goes_elsewhere_when_its_replica_has_no_row_free(folder: Path) -> None:
    """Eight requests of one session, two replicas of four rows: none waits while a row is free."""
    with slotted_server(4, 0.2, [7]) as one, slotted_server(4, 0.2, [8]) as other:
        engine = SGLangEngine(folder, max_length=64, rows=4, urls=[one, other], verify=False)

        async def play() -> list[Completion]:
            return await asyncio.gather(*(ask(engine, [i], "s") for i in range(8)))

        answered = [reply.token_ids[0] for reply in asyncio.run(play())]
        assert sorted(answered) == [7] * 4 + [8] * 4
        assert len(set(answered[:4])) == 1  # its own as long as that has rows


def test_requests_that_wait_for_a_slot_are_not_late(folder: Path) -> None:
    """200 requests, 8 slots, 0.2 s each and a deadline of 3 s: 5 s in all, so that those behind were late."""
    with slotted_server(8, 0.2) as url:
        engine = SGLangEngine(folder, max_length=64, rows=8, urls=[url], verify=False, timeout_s=3.0)

        async def play() -> tuple[list[Completion], float]:
            await ask(engine, [1])
            began = time.monotonic()
            replies = await asyncio.gather(*(ask(engine, [1 + i % 90]) for i in range(200)))
            return replies, time.monotonic() - began

        replies, took = asyncio.run(play())
        assert [reply.token_ids for reply in replies] == [(7,)] * 200
        assert took > 4.9


def test_completions_carry_versions_and_logprobs(make: Make) -> None:
    engine = make(version=2)

    async def play() -> tuple[Completion, Completion]:
        first = await ask(engine, [1])
        await engine.load_weights(tensors(), 5)
        return first, await ask(engine, [1])

    first, second = asyncio.run(play())
    assert [(s.version, s.start, s.end) for s in first.versions] == [(2, 0, 3)]  # the server says `default`
    assert [(s.version, s.start, s.end) for s in second.versions] == [(5, 0, 3)]
    assert first.logprobs == (-0.5,) * 3
    assert first.finish_reason == "length"
    assert engine.version == 5


def test_the_likeliest_token_keeps_its_temperature() -> None:
    def asked(**settings: Any) -> list[float]:
        said = body_of([1], Sampling(**settings), False)["sampling_params"]
        return [said[name] for name in ("temperature", "top_k", "top_p")]

    assert asked(temperature=0.7, top_k=20, top_p=0.9) == [0.7, 20, 0.9]
    assert asked(temperature=0.7, top_k=1) == [0.7, -1, 1e-6]
    assert asked(temperature=0.0, top_k=1) == [0.0, 1, 1.0]
    assert asked() == [1.0, -1, 1.0]


def test_a_reply_without_logprobs_is_an_error() -> None:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]]}
    with pytest.raises(EngineError, match="no log-probability for token 1 of a reply; is it NaN"):
        completion_of({"output_ids": [7, 8], "meta_info": meta}, 0)
    with pytest.raises(EngineError, match="2 log-probabilities for 3 tokens"):
        completion_of({"output_ids": [7, 8, 9], "meta_info": meta}, 0)


def test_a_refusal_is_told_and_the_server_goes_on(make: Make, tmp_path: Path) -> None:
    engine = make()

    async def play() -> Completion:
        await engine.load_weights(tensors(), 1)
        handover = engine._last
        assert handover is not None
        for file in Path(handover.place).iterdir():
            file.unlink()
        with pytest.raises(EngineError, match=r"/update_weights_from_disk: status 400: Failed to get weights iterator"):
            await engine.commit_update(handover)
        with pytest.raises(EngineError, match="token ids outside"):
            await ask(engine, [96])
        return await ask(engine, [1])

    assert asyncio.run(play()).versions[0].version == 1
    assert engine.version == 1


def test_a_dead_server_is_started_again_with_its_weights(make: Make, folder: Path) -> None:
    told: list[str] = []
    engine = make(restarts=1, tell=told.append)

    async def play() -> tuple[Completion, list[Completion]]:
        before = await ask(engine, [1])
        await engine.load_weights(tensors(), 7)
        (folder / "die").touch()
        after = await asyncio.gather(*(ask(engine, [13]) for _ in range(3)))
        (folder / "die").touch()
        with pytest.raises(EngineError, match=r"server\.0\.log says last: .*fake server version 7.*; no restart"):
            await ask(engine, [13])
        return before, after

    before, after = asyncio.run(play())
    assert len({before.token_ids, *(completion.token_ids for completion in after)}) == 2
    assert {completion.versions[0].version for completion in after} == {7}
    assert len(told) == 1
    assert re.search("fake server version 7 from [^;]*; started again, 0 restarts left$", told[0])


def test_members_join_with_new_weights_and_leave_while_others_go_on(make: Make, folder: Path, tmp_path: Path) -> None:
    words = server_arguments(SGLangSettings(folder=folder, max_length=64, rows=4))
    far = [Server(str(FAKE), words, str(tmp_path / f"member{n}.log"), {}) for n in (1, 2)]
    members, told = tmp_path / "members", list[str]()
    engine = make(members=members, tell=told.append)

    async def served() -> set[int]:
        """The servers that have the present weights and answer, each by its one token."""
        said = await asyncio.gather(*(ask(engine, [n + 20], f"session {n}") for n in range(12)))
        assert {completion.versions[-1].version for completion in said} == {engine.version}
        return {completion.token_ids[0] for completion in said}

    async def play() -> None:
        await engine.load_weights(tensors(), 1)  # there is no file of members yet
        alone = await served()
        first, second = (server.start() for server in far)
        members.write_text(f"# from another job\n{first}\n{second}/\nhttp://127.0.0.1:9\n")  # nobody is at the last
        while not await Replica(engine._settings, url=first).client.up():
            await asyncio.sleep(0.05)
        while not await Replica(engine._settings, url=second).client.up():
            await asyncio.sleep(0.05)
        assert await served() == alone  # they have no weights yet
        await engine.load_weights(tensors(), 2)
        tokens = {first: (far[0].pid() or 0) % 90, second: (far[1].pid() or 0) % 90}
        assert await served() == alone | set(tokens.values())
        far[1].stop()  # dies amid a step: what it was asked, the others are asked
        assert await served() == alone | {tokens[first]}
        await engine.load_weights(tensors(), 3)
        members.write_text("")
        await engine.load_weights(tensors(), 4)
        assert await served() == alone
        assert told == [
            f"SGLang: {first} joined; 2 servers",
            f"SGLang: {second} joined; 3 servers",
            f"SGLang: the server at {second} is gone, and it is not ours to start; 2 servers",
            f"SGLang: {first} is not among the members any more; 1 servers",
        ]

    try:
        asyncio.run(play())
        members.write_text("http://10.0.0.9:30000\n")
        with pytest.raises(EngineError, match=r"http://10.0.0.9:30000 is not on this machine; give the servers' key"):
            asyncio.run(engine.load_weights(tensors(), 5))
    finally:
        for server in far:
            server.stop()


def test_a_server_that_dies_before_it_reads_gets_the_new_weights(make: Make) -> None:
    engine = make(tell=lambda _: None)

    async def play() -> Completion:
        await ask(engine, [1])
        await engine.load_weights(tensors(), 1)
        pid = await engine._replicas[0].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await engine.load_weights(tensors(), 2)
        return await ask(engine, [1])

    assert asyncio.run(play()).versions[0].version == 2


def test_a_server_that_lost_its_weights_waits_until_they_are_sent_again_once(make: Make) -> None:
    engine = make(transport="changed", tell=lambda _: None)
    sent: list[int] = []

    async def trainer() -> None:
        while True:
            await engine.weights_lost()
            sent.append(engine.version)
            said = await engine._replicas[0].client.call("/what", {})
            assert said["calls"] == ["/pause_generation", "/what"]  # nobody is answered by the folder's weights
            await engine.load_weights(tensors(), engine.version)

    async def play() -> list[Completion]:
        await engine.load_weights(tensors(), 7)
        sending = asyncio.create_task(trainer())
        pid = await engine._replicas[0].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        first = asyncio.create_task(ask(engine, [1]))
        await asyncio.sleep(0.1)
        first.cancel()  # who came first may not stay, and the others still get the right weights
        await asyncio.gather(first, return_exceptions=True)
        answers = await asyncio.gather(*(ask(engine, [i, 5]) for i in range(8)))
        sending.cancel()
        return answers

    assert {said.versions[0].version for said in asyncio.run(play())} == {7}
    assert sent == [7]
    assert engine.starts == 2


def test_a_death_amid_an_update_is_told_to_who_sends_it(make: Make) -> None:
    engine = make(transport="changed", tell=lambda _: None)

    async def play() -> Completion:
        await engine.load_weights(tensors(), 1)
        route = await engine.begin_update()
        handover = make_sender(route).send(tensors(), 2, route.state)
        pid = await engine._replicas[0].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"SGLang: .* during an update; the weights must come again"):
            await engine.commit_update(handover)
        assert (await engine.begin_update()).state == {"base": None}  # all of them
        await engine.load_weights(tensors(), 2)
        return await ask(engine, [1])

    assert asyncio.run(play()).versions[0].version == 2


def test_a_deadline_is_kept_and_servers_end(make: Make) -> None:
    engine = make(timeout_s=0.5)

    async def play() -> int:
        await ask(engine, [1])
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"SGLang /generate: no answer within 0\.5 s"):
            await ask(engine, [14])
        assert time.monotonic() - began < 20
        gone = asyncio.create_task(ask(engine, [14]))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, *engine._tasks, return_exceptions=True)
        await asyncio.gather(*engine._tasks)
        said = await engine._replicas[0].client.call("/what", {})
        assert "/abort_request" in said["calls"]
        pid = await engine._replicas[0].pid()
        assert pid is not None
        return pid

    pid = asyncio.run(play())
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_only_what_sleeps_is_woken(make: Make) -> None:
    engine = make(restarts=1, tell=lambda _: None)

    async def calls() -> list[str]:
        said = await engine._replicas[0].client.call("/what", {})
        return [path for path in said["calls"] if "memory" in path or "health" in path]

    async def play() -> tuple[list[str], list[str]]:
        await engine.sleep(("kv_cache",))
        await engine.wake(("weights",))
        await engine.wake()
        await engine.wake()
        slept = await calls()
        await engine.sleep()
        pid = await engine._replicas[0].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await engine.wake(("weights",))
        await engine.load_weights(tensors(), 4)
        await engine.wake(("kv_cache",))
        return slept, await calls()

    slept, died = asyncio.run(play())
    assert slept == ["/release_memory_occupation", "/resume_memory_occupation"]
    assert died == []  # the new server never slept
    assert engine.starts == 2


def test_the_server_says_what_it_can_compute(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model here"):
        SGLangEngine(tmp_path, max_length=64, python=str(FAKE))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 9}')
    engine = SGLangEngine(tmp_path, max_length=64, python=str(FAKE))
    with pytest.raises(EngineError, match=r"token ids outside 0\.\.8"):
        asyncio.run(ask(engine, [9]))


def test_what_cannot_serve_is_refused_at_once(folder: Path, make: Make) -> None:
    with pytest.raises(EngineError, match=r"engine.python: no interpreter at /nowhere; see requirements/sglang.txt"):
        SGLangEngine(folder, max_length=64, python="/nowhere")
    with pytest.raises(EngineError, match=r"https://example.org is not on this machine; give the servers' key"):
        SGLangEngine(folder, max_length=64, urls=["https://example.org"])
    with pytest.raises(EngineError, match="SGLang has no transport 'shared'; known: disk, changed, tensor"):
        make(transport="shared")
    with pytest.raises(EngineError, match=r"weights go through a folder that both machines see: set engine.weights_f"):
        SGLangEngine(folder, max_length=64, urls=["https://example.org"], key="k")
    with pytest.raises(EngineError, match=r"engine.options: tp-size is not to be given .*; set engine.tp instead"):
        make(options={"tp_size": 2})
    with pytest.raises(EngineError, match=r"engine.options: nnodes is not to be given .*; set engine.replicas instead"):
        make(options={"nnodes": 2})
    with pytest.raises(EngineError, match=r"engine.options: port is not to be given to the servers; it is chosen here"):
        make(options={"port": 30000})
    server = SGLangEngine(folder, max_length=64, urls=["http://127.0.0.1:9"], start_s=0.1, restarts=0)
    with pytest.raises(EngineError, match=r"SGLang at http://127.0.0.1:9: not ready within 0.1 s"):
        asyncio.run(ask(server, [1]))


def test_arguments_are_the_servers_own(folder: Path, tmp_path: Path) -> None:
    options = {"mem-fraction-static": 0.8, "log-level": "error", "disable-cuda-graph": True, "skip-server-warmup": None}
    words = server_arguments(SGLangSettings(folder=folder, tp=2, max_length=64, rows=4, options=options))
    assert " ".join(words) == (
        f"--model-path {folder} --tp-size 2 --context-length 70 --max-running-requests 4 --skip-tokenizer-init "
        "--log-level error --mem-fraction-static 0.8 --disable-cuda-graph"
    )
    silent = Server(str(FAKE), [], str(tmp_path / "log"), {})
    assert silent.ended() == "the server ended"  # it was never started


def test_a_server_that_other_nodes_reach_is_told_its_address_and_a_key_in_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    words = server_arguments(SGLangSettings(folder=folder, tp=2, max_length=64, rows=4))
    server = Server(str(FAKE), words, str(tmp_path / "sglang.0.log"), {"OMP_NUM_THREADS": "3"}, "8" * 64, far=True)
    url = server.start(["4", "6"])
    try:
        said = asyncio.run(asked(url, "8" * 64))["arguments"]
        environment = Path(f"/proc/{server.pid()}/environ").read_text().split("\0")
    finally:
        server.stop()
    key = tmp_path / "sglang.0.key.yaml"
    assert said == [*words, "--config", str(key), "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    assert (key.stat().st_mode & 0o777, key.read_text()) == (0o600, f'api-key: "{"8" * 64}"\n')
    own = {"CUDA_VISIBLE_DEVICES=4,6", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=3"}
    assert own <= set(environment)
    assert not [entry for entry in environment if entry.startswith("PYTHONPATH=")]


def test_a_server_on_this_machine_asks_for_a_key_too(make: Make) -> None:
    """Whoever is on the machine could give it weights, and pickles to load."""
    engine = make()

    async def refused(key: str | None) -> None:
        client = SGLangClient(engine._replicas[0].client.url, timeout_s=20, connections=1, key=key)
        with pytest.raises(EngineError, match="/update_weights_from_tensor: status 401"):
            await client.call("/update_weights_from_tensor", {})

    async def play() -> None:
        assert len((await ask(engine, [1])).token_ids) == 3
        await refused(None)
        await refused("guessed")
        pid = await engine._replicas[0].pid()
        assert engine._settings.own_key not in Path(f"/proc/{pid}/cmdline").read_text()

    asyncio.run(play())
    assert [file.stat().st_mode & 0o777 for file in Path(engine._settings.log).parent.glob("*.key.yaml")] == [0o600]


async def asked(url: str, key: str | None = None) -> dict[str, Any]:
    """What the stand-in says of itself, when it is up."""
    client = SGLangClient(url, timeout_s=20, connections=1, key=key)
    while not await client.up():
        await asyncio.sleep(0.05)
    found: dict[str, Any] = await client.call("/arguments", {})
    return found


@pytest.mark.slow
def test_where_ray_runs_a_server_ends_with_its_actor_and_closing_again_does_nothing(
    make: Make, running_ray: None
) -> None:
    engines = [make(), make()]

    async def play(engine: SGLangEngine) -> int:
        await ask(engine, [1])
        pid = await engine._replicas[0].pid()
        assert pid is not None
        return pid

    pids = [asyncio.run(play(engine)) for engine in engines]
    ray.kill(engines[1]._replicas[0]._host)
    for engine in engines * 2:
        engine.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a server outlives its actor"
        time.sleep(0.05)


def test_a_server_without_a_node_leaves_where_another_goes_on(
    make: Make, running_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is lost and Ray has no other: here, none with the resource that its next actor asks for."""
    monkeypatch.setattr(fleet, "_ROOM_S", 1.0)
    told: list[str] = []
    engine = make(replicas=2, tell=told.append)

    async def play() -> None:
        await engine.load_weights(tensors(), 1)
        stays, lost = engine._replicas
        own = {(await stays.pid() or 0) % 90}
        nowhere = ray.remote(num_cpus=0)(Server).options(resources={"gone": 1})
        lost._actors = lambda: [nowhere.remote("python", [], "log", {})]
        ray.kill(lost._host)
        said = await asyncio.gather(*(ask(engine, [n + 20], f"session {n}") for n in range(12)))
        assert {completion.token_ids[0] for completion in said} == own
        await engine.load_weights(tensors(), 2)
        assert engine._replicas == [stays]

    asyncio.run(play())
    assert told[-1].endswith("gone with its actor; no node has had room for another within 1 s; 1 servers")


@pytest.mark.parametrize("options", [{}, {"incremental-streaming-output": True}], ids=["so far", "news"])
def test_a_reply_is_told_as_it_is_sampled_and_ends_when_nobody_listens(make: Make, options: dict[str, Any]) -> None:
    async def run() -> None:
        engine, heard = make(options=options), list[int]()

        def hear(place: int, ids: Sequence[int]) -> bool:
            heard[place:] = ids
            return len(heard) < 3

        whole = await engine.stream([1], Sampling(max_tokens=3), hear)
        assert heard == [whole.token_ids[0]] * 2  # the last comes with the reply
        assert whole == await engine.generate([1], Sampling(max_tokens=3))
        heard.clear()
        cut = await engine.stream([1], Sampling(max_tokens=50), hear)
        assert cut.finish_reason == "abort"
        assert 3 <= len(cut.token_ids) == len(cut.logprobs) < 50

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("mode", ["so_far", "news"])
def test_a_stream_that_a_real_server_sent_is_read_whatever_parts_it_comes_in(mode: str, size: int) -> None:
    """SGLang 0.5.23's own bytes, of a tiny model on a CPU; with `incremental-streaming-output` each event has news."""
    sent = (FAKE.parent / "recorded" / f"sglang_{mode}.txt").read_bytes()
    heard: list[tuple[int, list[int]]] = []
    reply = StreamedReply(lambda place, ids: heard.append((place, [*ids])) is None, lambda: None)
    take = reply.begin()
    for place in range(0, len(sent), size):
        take(sent[place : place + size])
    assert heard == [(0, [59]), (1, [93]), (2, [79])]  # the last comes with the reply
    got = completion_of(reply.whole("/generate"), 3)
    assert (got.token_ids, got.finish_reason) == ((59, 93, 79, 42), "length")
    assert got.logprobs == pytest.approx((-2.960897, -4.383044, -7.336450, -4.814980), abs=1e-6)
    assert [(span.version, span.start, span.end) for span in got.versions] == [(3, 0, 4)]


def test_what_a_server_refuses_in_a_stream_is_its_error() -> None:
    reason = {"type": "abort", "message": "out of memory", "status_code": 503, "err_type": None}
    meta = {"finish_reason": reason, "completion_tokens": 0, "output_token_logprobs": []}
    reply = StreamedReply(lambda place, ids: True, lambda: None)
    reply.begin()(b"data: " + json.dumps({"output_ids": [], "meta_info": meta}).encode() + b"\n\ndata: [DONE]\n\n")
    with pytest.raises(EngineError, match="SGLang /generate: out of memory"):
        reply.whole("/generate")


def test_servers_on_one_gpu_start_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats 0 and 1 of one engine, seat 1 of another: the servers with a seat in common never start together."""
    said: list[str] = []

    async def starts(replica: Replica, name: str) -> None:
        async def answering(_: float) -> None:
            said.append(f"{name} starts")
            await asyncio.sleep(0)
            said.append(f"{name} answers")

        monkeypatch.setattr(replica, "_answering", answering)
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
