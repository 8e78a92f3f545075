"""What the SGLang engine does around its servers; `make test-sglang` runs it on real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines import TokenCallback
from rollout.engines.sglang.client import StreamedReply, parse_completion, request_body
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.server import Server, server_arguments
from rollout.engines.sglang.settings import SGLangSettings
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import make_sender
from tests.support.sglang_server import pid_of
from tests.support.slotted_sglang import slotted_server
from tests.support.tiny import make_model

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
Make = Callable[..., SGLangEngine]


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, tensor in make_model(1).state_dict().items()
        if name != "lm_head.weight"
    ]


async def ask(engine: SGLangEngine, prompt: list[int], session: str = "") -> Completion:
    return await engine.generate(prompt, Sampling(max_tokens=3, session=session))


def test_sessions_stay_with_their_replica(make: Make) -> None:
    engine = make(replicas=2)

    async def play() -> tuple[list[int], list[int], list[int]]:
        sessions = [await ask(engine, [i, 5], f"task/{i}") for i in range(16)]
        again = [await ask(engine, [i, 5, 6], f"task/{i}") for i in range(16)]
        alone = await asyncio.gather(*(ask(engine, [7, 8]) for _ in range(4)))
        return tuple(
            [completion.token_ids[0] for completion in part] for part in (sessions, again, alone)
        )

    sessions, again, alone = asyncio.run(play())
    assert sessions == again
    assert len(set(sessions)) == 2
    assert len(set(alone)) == 1  # equal prompts meet


def test_a_session_goes_elsewhere_when_its_replica_has_no_row_free(folder: Path) -> None:
    """Eight requests of one session, two replicas of four rows: none waits while a row is free."""
    with slotted_server(4, 0.2, [7]) as one, slotted_server(4, 0.2, [8]) as other:
        engine = SGLangEngine(
            SGLangSettings(folder=folder, max_length=64, rows=4, urls=[one, other], verify=False)
        )

        async def play() -> list[Completion]:
            return await asyncio.gather(*(ask(engine, [i], "s") for i in range(8)))

        answered = [reply.token_ids[0] for reply in asyncio.run(play())]
        assert sorted(answered) == [7] * 4 + [8] * 4
        assert len(set(answered[:4])) == 1  # its own as long as that has rows


@pytest.mark.slow
def test_requests_that_wait_for_a_slot_are_not_late(folder: Path) -> None:
    """200 requests, 8 slots, 0.2 s each and a deadline of 3 s: 5 s in all, so that those behind were late."""
    with slotted_server(8, 0.2) as url:
        engine = SGLangEngine(
            SGLangSettings(
                folder=folder, max_length=64, rows=8, urls=[url], verify=False, timeout_s=3.0
            )
        )

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
    assert [(s.version, s.start, s.end) for s in first.versions] == [
        (2, 0, 3)
    ]  # the server says `default`
    assert [(s.version, s.start, s.end) for s in second.versions] == [(5, 0, 3)]
    assert first.logprobs == (-0.5,) * 3
    assert first.finish_reason == "length"
    assert engine.version == 5


def test_the_likeliest_token_keeps_its_temperature() -> None:
    def sent_parameters(**settings: Any) -> list[float]:
        body = request_body([1], Sampling(**settings), seeded=False)
        return [body["sampling_params"][name] for name in ("temperature", "top_k", "top_p")]

    assert sent_parameters(temperature=0.7, top_k=20, top_p=0.9) == [0.7, 20, 0.9]
    assert sent_parameters(temperature=0.7, top_k=1) == [0.7, -1, 1e-6]
    assert sent_parameters(temperature=0.0, top_k=1) == [0.0, 1, 1.0]
    assert sent_parameters() == [1.0, -1, 1.0]


def test_a_reply_without_logprobs_is_an_error() -> None:
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]],
    }
    with pytest.raises(EngineError, match="no log-probability for token 1 of a reply; is it NaN"):
        parse_completion({"output_ids": [7, 8], "meta_info": meta}, 0)
    with pytest.raises(EngineError, match="2 log-probabilities for 3 tokens"):
        parse_completion({"output_ids": [7, 8, 9], "meta_info": meta}, 0)


def test_a_refusal_is_told_and_the_server_goes_on(make: Make, tmp_path: Path) -> None:
    engine = make()

    async def play() -> Completion:
        await engine.load_weights(tensors(), 1)
        update = engine._last_update
        assert update is not None
        for file in Path(update.location).iterdir():
            file.unlink()
        with pytest.raises(
            EngineError,
            match=r"/update_weights_from_disk: status 400: Failed to get weights iterator",
        ):
            await engine.commit_update(update)
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
        with pytest.raises(
            EngineError, match=r"server\.0\.log says last: .*fake server version 7.*; no restart"
        ):
            await ask(engine, [13])
        return before, after

    before, after = asyncio.run(play())
    assert len({before.token_ids, *(completion.token_ids for completion in after)}) == 2
    assert {completion.versions[0].version for completion in after} == {7}
    assert len(told) == 1
    assert re.search("fake server version 7 from [^;]*; started again, 0 restarts left$", told[0])


@pytest.mark.slow
def test_members_join_with_new_weights_and_leave_while_others_go_on(
    make: Make, folder: Path, tmp_path: Path
) -> None:
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
        members.write_text(
            f"# from another job\n{first}\n{second}/\nhttp://127.0.0.1:9\n"
        )  # nobody is at the last
        while not await Replica(engine.settings, url=first).client.up():
            await asyncio.sleep(0.05)
        while not await Replica(engine.settings, url=second).client.up():
            await asyncio.sleep(0.05)
        assert await served() == alone  # they have no weights yet
        await engine.load_weights(tensors(), 2)
        tokens = {first: far[0].pid(), second: far[1].pid()}
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
        with pytest.raises(
            EngineError,
            match=r"http://10.0.0.9:30000 is not on this machine; give the servers' key",
        ):
            asyncio.run(engine.load_weights(tensors(), 5))
    finally:
        for server in far:
            server.stop()


@pytest.mark.slow
def test_a_server_that_dies_before_it_reads_gets_the_new_weights(make: Make) -> None:
    engine = make(tell=lambda _: None)

    async def play() -> Completion:
        await ask(engine, [1])
        await engine.load_weights(tensors(), 1)
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await engine.load_weights(tensors(), 2)
        return await ask(engine, [1])

    assert asyncio.run(play()).versions[0].version == 2


def test_a_server_that_lost_its_weights_waits_until_they_are_sent_again_once(
    make: Make, shared_by_name: None
) -> None:
    engine = make(transport="tensor", tell=lambda _: None)
    sent: list[int] = []

    async def trainer() -> None:
        while True:
            await engine.weights_lost()
            sent.append(engine.version)
            said = await engine.fleet.replicas[0].client.call("/what", {})
            assert said["calls"] == [
                "/pause_generation",
                "/what",
            ]  # nobody is answered by the folder's weights
            await engine.load_weights(tensors(), engine.version)

    async def play() -> list[Completion]:
        await engine.load_weights(tensors(), 7)
        sending = asyncio.create_task(trainer())
        pid = await pid_of(engine.fleet.replicas[0])
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


@pytest.mark.slow
def test_a_death_amid_an_update_is_told_to_who_sends_it(make: Make, shared_by_name: None) -> None:
    engine = make(transport="tensor", tell=lambda _: None)

    async def play() -> Completion:
        await engine.load_weights(tensors(), 1)
        route = await engine.begin_update()
        update = make_sender(route).send(tensors(), 2)
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            EngineError, match=r"SGLang: .* during an update; the weights must come again"
        ):
            await engine.commit_update(update)
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
        await asyncio.gather(gone, *engine.background, return_exceptions=True)
        await asyncio.gather(*engine.background)
        said = await engine.fleet.replicas[0].client.call("/what", {})
        assert "/abort_request" in said["calls"]
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        return pid

    pid = asyncio.run(play())
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_only_what_sleeps_is_woken_and_the_reverse(make: Make) -> None:
    async def memory_calls() -> list[str]:
        record = await engine.fleet.replicas[0].client.call("/what", {})
        return [path for path in record["calls"] if "memory" in path or "health" in path]

    at_restart: list[list[str]] = []  # before and after it, in the guard

    @asynccontextmanager
    async def restart_guard() -> AsyncIterator[None]:
        at_restart.append(sorted([*engine.fleet.replicas[0].asleep, str(engine.starts)]))
        yield
        at_restart.append(sorted([*await memory_calls(), str(engine.starts)]))

    engine = make(restarts=1, tell=lambda _: None, restart_guard=restart_guard)
    asleep = []

    async def play() -> tuple[list[str], list[str]]:
        await engine.sleep(("kv_cache",))
        asleep.append(sorted(engine.fleet.replicas[0].asleep))
        await engine.sleep(("kv_cache",))
        await engine.wake(("weights",))
        await engine.wake()
        await engine.wake()
        asleep.append(sorted(engine.fleet.replicas[0].asleep))
        slept = await memory_calls()
        await engine.sleep()
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await engine.wake(("weights",))
        await engine.load_weights(tensors(), 4)
        await engine.wake(("kv_cache",))
        return slept, await memory_calls()

    slept, died = asyncio.run(play())
    give, take = "/release_memory_occupation", "/resume_memory_occupation"
    assert slept == [give, take]
    assert asleep == [["cuda_graph", "kv_cache"], []]
    # The server starts and frees its memory again inside the guard.
    assert at_restart == [["1", "cuda_graph", "kv_cache", "weights"], [give, "2"]]
    assert died == [give, take, take]
    assert engine.starts == 2


@pytest.mark.parametrize(
    "options", [{"incremental-streaming-output": False}, {}], ids=["so far", "news"]
)
def test_a_reply_is_told_as_it_is_sampled_and_ends_when_nobody_listens(
    make: Make, options: dict[str, Any]
) -> None:
    async def run() -> None:
        engine, heard = make(options=options), list[int]()

        def note(place: int, token_ids: Sequence[int]) -> bool:
            heard[place:] = token_ids
            return len(heard) < 3

        hear = TokenCallback(note)
        whole = await engine.stream([1], Sampling(max_tokens=3), hear)
        assert heard == [whole.token_ids[0]] * 2  # the last comes with the reply
        assert whole == await engine.generate([1], Sampling(max_tokens=3))
        heard.clear()
        cut = await engine.stream([1], Sampling(max_tokens=50), hear)
        assert cut.finish_reason == "abort"
        assert 3 <= len(cut.token_ids) == len(cut.logprobs) < 50

    asyncio.run(run())


def test_a_reply_is_told_in_as_many_tokens_as_are_worth_it(make: Make) -> None:
    async def run() -> None:
        engine, heard = make(), list[tuple[int, int]]()

        def note(place: int, token_ids: Sequence[int]) -> bool:
            heard.append((place, len(token_ids)))
            return True

        hear = TokenCallback(note, every=4)
        whole = await engine.stream([1], Sampling(max_tokens=11), hear)
        assert heard == [(0, 1), (1, 4), (5, 4)]
        assert whole == await engine.generate([1], Sampling(max_tokens=11))

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("mode", ["so_far", "news"])
def test_a_stream_that_a_real_server_sent_is_read_whatever_parts_it_comes_in(
    mode: str, size: int
) -> None:
    """SGLang 0.5.23's own bytes, of a tiny model on a CPU; with `incremental-streaming-output` each event has news."""
    sent = (FAKE.parent / "recorded" / f"sglang_{mode}.txt").read_bytes()
    heard: list[tuple[int, list[int]]] = []
    hear = TokenCallback(lambda place, ids: heard.append((place, [*ids])) is None)
    reply = StreamedReply(hear, lambda: None)
    take = reply.begin()
    for place in range(0, len(sent), size):
        take(sent[place : place + size])
    assert heard == [(0, [59]), (1, [93]), (2, [79])]  # the last comes with the reply
    got = parse_completion(reply.result("/generate"), 3)
    assert (got.token_ids, got.finish_reason) == ((59, 93, 79, 42), "length")
    assert got.logprobs == pytest.approx((-2.960897, -4.383044, -7.336450, -4.814980), abs=1e-6)
    assert [(span.version, span.start, span.end) for span in got.versions] == [(3, 0, 4)]


def test_what_a_server_refuses_in_a_stream_is_its_error() -> None:
    reason = {"type": "abort", "message": "out of memory", "status_code": 503, "err_type": None}
    meta = {"finish_reason": reason, "completion_tokens": 0, "output_token_logprobs": []}
    reply = StreamedReply(TokenCallback(lambda position, ids: True), lambda: None)
    reply.begin()(
        b"data: "
        + json.dumps({"output_ids": [], "meta_info": meta}).encode()
        + b"\n\ndata: [DONE]\n\n"
    )
    with pytest.raises(EngineError, match="SGLang /generate: out of memory"):
        reply.result("/generate")
