"""SGLang engine on stand-ins of its servers; `make test-sglang` runs it on real ones."""

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


async def generate(engine: SGLangEngine, prompt: list[int], session: str = "") -> Completion:
    return await engine.generate(prompt, Sampling(max_tokens=3, session=session))


async def server_record(engine: SGLangEngine) -> dict[str, Any]:
    """Return what the engine's first server, a stand-in, has recorded."""
    record: dict[str, Any] = await engine.fleet.replicas[0].client.call("/what", {})
    return record


async def kill_server(engine: SGLangEngine) -> None:
    """Kill the process of the engine's first server."""
    pid = await pid_of(engine.fleet.replicas[0])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    """Return version, first token and end of each version span."""
    return [(span.version, span.start, span.end) for span in completion.versions]


def ignore(_: str) -> None:
    """Drop a warning of the engine."""


def test_sessions_stay_with_their_replica(make: Make) -> None:
    engine = make(replicas=2)

    async def server_of(prompt: list[int], session: str = "") -> int:
        """Return the token that the server which answers gives in every reply."""
        completion = await generate(engine, prompt, session)
        return completion.token_ids[0]

    async def run() -> None:
        first_turns = [await server_of([i, 5], f"task/{i}") for i in range(16)]
        next_turns = [await server_of([i, 5, 6], f"task/{i}") for i in range(16)]
        assert first_turns == next_turns
        assert len(set(first_turns)) == 2
        # Equal prompts without a session go to one server too.
        same_prompt = await asyncio.gather(*(server_of([7, 8]) for _ in range(4)))
        assert len(set(same_prompt)) == 1

    asyncio.run(run())


def test_a_session_goes_elsewhere_when_its_replica_has_no_free_row(folder: Path) -> None:
    """Send eight requests of one session to two replicas of four rows each."""
    with slotted_server(4, 0.2, [7]) as first, slotted_server(4, 0.2, [8]) as second:
        urls = [first, second]
        engine = SGLangEngine(
            SGLangSettings(folder=folder, max_length=64, rows=4, urls=urls, compare_servers=False)
        )

        async def play() -> list[Completion]:
            return await asyncio.gather(*(generate(engine, [i], "s") for i in range(8)))

        tokens = [completion.token_ids[0] for completion in asyncio.run(play())]
        assert sorted(tokens) == [7] * 4 + [8] * 4
        assert len(set(tokens[:4])) == 1  # the session's own replica, as long as it has rows


def test_a_grammar_is_sent_to_servers_that_were_started_for_grammars(
    make: Make, tmp_path: Path
) -> None:
    model = make_model(0)
    model.config.eos_token_id = 2
    model.save_pretrained(tmp_path / "ending")
    grammar = '%llguidance {}\nstart: "yes" <[2]>\n'
    sampling = Sampling(max_tokens=3, grammar=grammar)

    async def ask(engine: SGLangEngine) -> list[str]:
        await engine.generate([1], sampling)
        await generate(engine, [1])
        grammars: list[str] = (await server_record(engine))["grammars"]
        return grammars

    assert asyncio.run(ask(make(grammar=True, folder=tmp_path / "ending"))) == [grammar]
    with pytest.raises(EngineError, match="Grammar-based generation is not supported"):
        asyncio.run(ask(make()))


def test_grammars_need_a_model_that_names_its_last_token(make: Make) -> None:
    with pytest.raises(EngineError, match=r"config.json: .* SGLang needs eos_token_id"):
        make(grammar=True)


def test_candidates_are_asked_for_and_impossible_ones_left_out(make: Make) -> None:
    engine = make()

    async def ask(count: int, stream: bool) -> Completion:
        callback = TokenCallback(lambda position, token_ids: True) if stream else None
        return await engine.stream([1], Sampling(max_tokens=2, candidates=count), callback)

    async def run() -> None:
        for stream in (False, True):
            completion = await ask(3, stream)
            possible = ((completion.token_ids[0], -0.5), (7, -1.5))
            assert completion.candidates == (possible, possible)
            assert (await ask(1, stream)).candidates == (possible[:1], possible[:1])
            assert not any((await ask(0, stream)).candidates)

    asyncio.run(run())


@pytest.mark.slow
def test_requests_that_wait_for_a_slot_are_not_late(folder: Path) -> None:
    """Send 200 requests of 0.2 s to 8 slots, which takes 5 s, with a deadline of 3 s."""
    with slotted_server(8, 0.2) as url:
        engine = SGLangEngine(
            SGLangSettings(
                folder=folder,
                max_length=64,
                rows=8,
                urls=[url],
                compare_servers=False,
                timeout_s=3.0,
            )
        )

        async def play() -> tuple[list[Completion], float]:
            await generate(engine, [1])
            began = time.monotonic()
            replies = await asyncio.gather(*(generate(engine, [1 + i % 90]) for i in range(200)))
            return replies, time.monotonic() - began

        replies, seconds = asyncio.run(play())
        assert [reply.token_ids for reply in replies] == [(7,)] * 200
        assert seconds > 4.9


def test_completions_carry_versions_and_logprobs(make: Make) -> None:
    engine = make(version=2)

    async def play() -> tuple[Completion, Completion]:
        first = await generate(engine, [1])
        await engine.load_weights(tensors(), 5)
        return first, await generate(engine, [1])

    first, second = asyncio.run(play())
    # Before its first update, a server calls its version "default".
    assert spans(first) == [(2, 0, 3)]
    assert spans(second) == [(5, 0, 3)]
    assert first.logprobs == (-0.5,) * 3
    assert first.finish_reason == "length"
    assert engine.version == 5


def test_top_k_1_is_sent_as_a_small_top_p() -> None:
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


def test_a_refused_update_leaves_the_weights_before(make: Make, tmp_path: Path) -> None:
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
            await generate(engine, [96])
        return await generate(engine, [1])

    assert asyncio.run(play()).versions[0].version == 1
    assert engine.version == 1


def test_a_dead_server_is_started_again_with_its_weights(make: Make, folder: Path) -> None:
    warnings: list[str] = []
    engine = make(restarts=1, tell=warnings.append)

    async def play() -> tuple[Completion, list[Completion]]:
        before = await generate(engine, [1])
        await engine.load_weights(tensors(), 7)
        (folder / "die").touch()  # the server ends when it is asked prompt [13]
        after = await asyncio.gather(*(generate(engine, [13]) for _ in range(3)))
        (folder / "die").touch()
        with pytest.raises(
            EngineError, match=r"server\.0\.log says last: .*fake server version 7.*; no restart"
        ):
            await generate(engine, [13])
        return before, after

    before, after = asyncio.run(play())
    assert len({before.token_ids, *(completion.token_ids for completion in after)}) == 2
    assert {completion.versions[0].version for completion in after} == {7}
    (warning,) = warnings
    assert re.search(
        "fake server version 7 from [^;]*; starting it again, 0 restarts left$", warning
    )


@pytest.mark.slow
def test_members_join_with_new_weights_and_leave_while_others_go_on(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    arguments = server_arguments(SGLangSettings(folder=folder, max_length=64, rows=4))
    servers = [
        Server(str(FAKE), arguments, str(tmp_path / f"member{number}.log"), {}) for number in (1, 2)
    ]
    members = tmp_path / "members"
    lines: list[str] = []
    engine = make(members=members, tell=lines.append)

    async def answering_servers() -> set[int]:
        """Return the servers that answer, each by its token; all must have the present weights."""
        completions = await asyncio.gather(
            *(generate(engine, [n + 20], f"session {n}") for n in range(12))
        )
        versions = {completion.versions[-1].version for completion in completions}
        assert versions == {engine.version}
        return {completion.token_ids[0] for completion in completions}

    async def wait_until_up(url: str) -> None:
        while not await Replica(engine.settings, url=url).client.up():
            await asyncio.sleep(0.05)

    async def play() -> None:
        await engine.load_weights(tensors(), 1)  # there is no file of members yet
        own_server = await answering_servers()
        first = servers[0].start()
        second = servers[1].start()
        no_server = "http://127.0.0.1:9"
        members.write_text(f"# from another job\n{first}\n{second}/\n{no_server}\n")
        await wait_until_up(first)
        await wait_until_up(second)
        assert await answering_servers() == own_server  # the members have no weights yet

        await engine.load_weights(tensors(), 2)
        # The token of a server is its process id.
        first_token = servers[0].pid()
        second_token = servers[1].pid()
        assert await answering_servers() == own_server | {first_token, second_token}
        servers[1].stop()  # its requests go to the others
        assert await answering_servers() == own_server | {first_token}

        await engine.load_weights(tensors(), 3)
        members.write_text("")
        await engine.load_weights(tensors(), 4)
        assert await answering_servers() == own_server
        assert lines == [
            f"SGLang: {first} joined; 2 servers",
            f"SGLang: {second} joined; 3 servers",
            f"SGLang: the server at {second} is gone, and it was not started by this run; 2 servers",
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
        for server in servers:
            server.stop()


@pytest.mark.slow
def test_a_server_that_dies_before_it_reads_gets_the_new_weights(make: Make) -> None:
    engine = make(tell=ignore)

    async def play() -> Completion:
        await generate(engine, [1])
        await engine.load_weights(tensors(), 1)
        await kill_server(engine)
        await engine.load_weights(tensors(), 2)
        return await generate(engine, [1])

    assert asyncio.run(play()).versions[0].version == 2


def test_a_server_that_lost_its_weights_waits_until_they_are_sent_again_once(
    make: Make, shared_by_name: None
) -> None:
    engine = make(transport="tensor", tell=ignore)
    sent_versions: list[int] = []

    async def resend_weights() -> None:
        while True:
            await engine.weights_lost()
            sent_versions.append(engine.version)
            record = await server_record(engine)
            # The server has not sampled with the weights of the folder.
            assert record["calls"] == ["/pause_generation", "/what"]
            await engine.load_weights(tensors(), engine.version)

    async def play() -> list[Completion]:
        await engine.load_weights(tensors(), 7)
        resending = asyncio.create_task(resend_weights())
        await kill_server(engine)
        first = asyncio.create_task(generate(engine, [1]))
        await asyncio.sleep(0.1)
        first.cancel()  # the first call that needs the weights does not wait for them
        await asyncio.gather(first, return_exceptions=True)
        completions = await asyncio.gather(*(generate(engine, [i, 5]) for i in range(8)))
        resending.cancel()
        return completions

    completions = asyncio.run(play())
    assert {completion.versions[0].version for completion in completions} == {7}
    assert sent_versions == [7]
    assert engine.starts == 2


@pytest.mark.slow
def test_a_death_during_an_update_fails_the_update(make: Make, shared_by_name: None) -> None:
    engine = make(transport="tensor", tell=ignore)

    async def play() -> Completion:
        await engine.load_weights(tensors(), 1)
        route = await engine.begin_update()
        update = make_sender(route).send(tensors(), 2)
        await kill_server(engine)
        with pytest.raises(
            EngineError, match=r"SGLang: .* during an update; the weights must be sent again"
        ):
            await engine.commit_update(update)
        await engine.load_weights(tensors(), 2)
        return await generate(engine, [1])

    assert asyncio.run(play()).versions[0].version == 2


def test_late_and_cancelled_requests_are_aborted_and_servers_end(make: Make) -> None:
    engine = make(timeout_s=0.5)

    async def play() -> int:
        await generate(engine, [1])
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"SGLang /generate: no answer within 0\.5 s"):
            await generate(engine, [14])
        assert time.monotonic() - began < 20
        cancelled = asyncio.create_task(generate(engine, [14]))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.gather(cancelled, *engine.background, return_exceptions=True)
        await asyncio.gather(*engine.background)
        record = await server_record(engine)
        assert "/abort_request" in record["calls"]
        pid = await pid_of(engine.fleet.replicas[0])
        assert pid is not None
        return pid

    pid = asyncio.run(play())
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_memory_is_freed_and_allocated_only_once(make: Make) -> None:
    async def memory_calls() -> list[str]:
        record = await server_record(engine)
        return [path for path in record["calls"] if "memory" in path or "health" in path]

    at_restart: list[list[str]] = []  # state before and after the restart, inside the guard

    @asynccontextmanager
    async def restart_guard() -> AsyncIterator[None]:
        at_restart.append(sorted([*engine.fleet.replicas[0].asleep, str(engine.starts)]))
        yield
        at_restart.append(sorted([*await memory_calls(), str(engine.starts)]))

    engine = make(restarts=1, tell=ignore, restart_guard=restart_guard)
    asleep = []

    async def play() -> tuple[list[str], list[str]]:
        await engine.sleep(("kv_cache",))
        asleep.append(sorted(engine.fleet.replicas[0].asleep))
        await engine.sleep(("kv_cache",))
        await engine.wake(("weights",))
        await engine.wake()
        await engine.wake()
        asleep.append(sorted(engine.fleet.replicas[0].asleep))
        first_calls = await memory_calls()
        await engine.sleep()
        await kill_server(engine)
        await engine.wake(("weights",))
        await engine.load_weights(tensors(), 4)
        await engine.wake(("kv_cache",))
        return first_calls, await memory_calls()

    first_calls, calls_after_death = asyncio.run(play())
    release = "/release_memory_occupation"
    resume = "/resume_memory_occupation"
    assert first_calls == [release, resume]
    assert asleep == [["cuda_graph", "kv_cache"], []]
    # The server starts and frees its memory again inside the guard.
    assert at_restart == [["1", "cuda_graph", "kv_cache", "weights"], [release, "2"]]
    assert calls_after_death == [release, resume, resume]
    assert engine.starts == 2


def test_a_server_that_dies_again_before_it_frees_its_memory_frees_it_at_the_next_start(
    make: Make, folder: Path
) -> None:
    engine = make(restarts=2, tell=ignore)

    async def play() -> tuple[set[str], list[str]]:
        await engine.sleep()
        (folder / "die_at_release").touch()
        await kill_server(engine)
        await engine.wake(
            ("weights",)
        )  # the first start ends at its release, the second one does not
        record = await server_record(engine)
        return engine.fleet.replicas[0].asleep, record["calls"]

    asleep, calls = asyncio.run(play())
    assert asleep == {"cuda_graph", "kv_cache"}
    memory_calls = [path for path in calls if "memory" in path]
    assert memory_calls == ["/release_memory_occupation", "/resume_memory_occupation"]
    assert engine.starts == 3


@pytest.mark.parametrize(
    "options",
    [{"incremental-streaming-output": False}, {}],
    ids=["all tokens in each event", "new tokens in each event"],
)
def test_tokens_are_reported_until_the_callback_returns_false(
    make: Make, options: dict[str, Any]
) -> None:
    reported: list[int] = []

    def take_three(position: int, token_ids: Sequence[int]) -> bool:
        reported[position:] = token_ids
        return len(reported) < 3

    async def run() -> None:
        engine = make(options=options)
        callback = TokenCallback(take_three)
        completion = await engine.stream([1], Sampling(max_tokens=3), callback)
        # The last token comes with the reply.
        assert reported == [completion.token_ids[0]] * 2
        assert completion == await engine.generate([1], Sampling(max_tokens=3))

        reported.clear()
        aborted = await engine.stream([1], Sampling(max_tokens=50), callback)
        assert aborted.finish_reason == "abort"
        assert 3 <= len(aborted.token_ids) < 50
        assert len(aborted.logprobs) == len(aborted.token_ids)

    asyncio.run(run())


def test_tokens_are_reported_in_the_requested_number(make: Make) -> None:
    reports: list[tuple[int, int]] = []  # position and number of tokens

    def record(position: int, token_ids: Sequence[int]) -> bool:
        reports.append((position, len(token_ids)))
        return True

    async def run() -> None:
        engine = make()
        callback = TokenCallback(record, every=4)
        completion = await engine.stream([1], Sampling(max_tokens=11), callback)
        assert reports == [(0, 1), (1, 4), (5, 4)]
        assert completion == await engine.generate([1], Sampling(max_tokens=11))

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("mode", ["so_far", "news"])
def test_the_recorded_stream_of_a_real_server_is_read_in_parts_of_any_size(
    mode: str, size: int
) -> None:
    """Read the bytes that SGLang 0.5.23 sent for a tiny model on a CPU.

    With `incremental-streaming-output` (mode "news"), each event has only the new tokens.
    """
    stream = (FAKE.parent / "recorded" / f"sglang_{mode}.txt").read_bytes()
    reports: list[tuple[int, list[int]]] = []

    def record(position: int, token_ids: Sequence[int]) -> bool:
        reports.append((position, list(token_ids)))
        return True

    reply = StreamedReply(TokenCallback(record), lambda: None)
    take = reply.begin()
    for start in range(0, len(stream), size):
        take(stream[start : start + size])
    assert reports == [(0, [59]), (1, [93]), (2, [79])]  # the last token comes with the reply
    completion = parse_completion(reply.result("/generate"), 3)
    assert completion.token_ids == (59, 93, 79, 42)
    assert completion.finish_reason == "length"
    expected_logprobs = (-2.960897, -4.383044, -7.336450, -4.814980)
    assert completion.logprobs == pytest.approx(expected_logprobs, abs=1e-6)
    assert spans(completion) == [(3, 0, 4)]


def test_a_reply_that_is_streamed_again_is_ended_again() -> None:
    """Break the stream after the callback has ended the reply, before the last event."""
    meta = {
        "finish_reason": None,
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
    }
    event = b"data: " + json.dumps({"output_ids": [7], "meta_info": meta}).encode() + b"\n\n"
    positions: list[int] = []
    aborts: list[str] = []

    def end_reply(position: int, token_ids: Sequence[int]) -> bool:
        positions.append(position)
        return False

    reply = StreamedReply(TokenCallback(end_reply), lambda: aborts.append("abort"))
    reply.begin()(event)
    assert positions == [0]
    assert len(aborts) == 1

    take = reply.begin()
    take(event)
    take(event)  # the server has not ended the reply yet
    assert positions == [0, 0]
    assert len(aborts) == 2


def test_a_failure_in_a_stream_is_an_engine_error() -> None:
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


@pytest.mark.parametrize(
    ("options", "seeded"),
    [
        ({}, False),
        ({"enable-deterministic-inference": True}, True),
        ({"rl-on-policy-target": "fsdp"}, True),  # includes deterministic inference
    ],
)
def test_seeds_are_sent_where_sglang_samples_by_them(
    make: Make, options: dict[str, Any], seeded: bool
) -> None:
    assert make(options=options).settings.seeded is seeded
