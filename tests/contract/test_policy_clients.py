"""All clients fulfil the contract of `rollout.engines.PolicyClient`.

The clients are those of the embedded engine, of a scripted engine and of a remote model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import EngineError
from rollout.config.agents import build_player
from rollout.engines import PolicyClient, PolicyReply
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.remote import RemoteConfig
from rollout.engines.remote.client import RemoteClient
from rollout.records.trajectory import Message, Sampling
from tests.support.chat_server import Response, chat_server, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny import MAX_LENGTH, make_model

# Too long for the embedded engine; the other two are scripted to refuse it.
REFUSED = "x" * (MAX_LENGTH + 1)
SAMPLINGS = (
    Sampling(temperature=0.3, top_p=0.5, max_tokens=5, seed=1),
    Sampling(temperature=1.0, top_p=0.9, max_tokens=9, seed=2),
    Sampling(temperature=0.0, max_tokens=2, seed=3),
)

SamplingValues = tuple[float, float, int, int]
Check = Callable[[PolicyClient, Callable[[], list[SamplingValues]]], Awaitable[None]]
RunCheck = Callable[[Check], None]


class Letters:
    """Renderer with one token per letter and no stop token."""

    stop = ()

    def render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        content = b"".join(message.content.encode() for message in messages)
        return tuple(byte % 96 for byte in content)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(32 + token) for token in token_ids)


def scripted_reply(prompt: tuple[int, ...], call: int) -> list[int]:
    if len(prompt) > MAX_LENGTH:
        raise EngineError("the script refuses")
    return [*prompt, 7]


def remote_reply(body: dict[str, Any], number: int) -> Response:
    text = body["messages"][-1]["content"]
    if text == REFUSED:
        return Response(b"too long", status=400)
    return says(f"I heard {text}.", delay_s=0.05)


def sampling_values(sampling: Sampling) -> SamplingValues:
    return sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed


@pytest.fixture(params=["embedded_local", "scripted", "external"])
def run_check(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunCheck]:
    """Return a function that runs check(client, requested).

    `requested` returns the sampling values of all requests so far.
    """
    if request.param == "external":
        yield from _remote_client(tmp_path)
    elif request.param == "scripted":
        engine = ScriptedEngine(scripted_reply)
        yield _runner(engine, lambda: [sampling_values(sampling) for _, sampling in engine.calls])
    else:
        make_model(0).save_pretrained(tmp_path)
        core = EmbeddedEngine.from_folder(tmp_path, max_length=MAX_LENGTH, rows=8)
        requested: list[SamplingValues] = []
        submit = core.submit

        def record(number: int, prompt: Any, sampling: Sampling, **keywords: Any) -> None:
            requested.append(sampling_values(sampling))
            submit(number, prompt, sampling, **keywords)

        core.submit = record  # type: ignore[method-assign]
        yield _runner(LocalEngine(core), lambda: requested)


def _runner(engine: Any, requested: Callable[[], list[SamplingValues]]) -> RunCheck:
    client = build_player(engine, Letters())

    def run(check: Check) -> None:
        asyncio.run(check(client, requested))  # type: ignore[arg-type]

    return run


def _remote_client(folder: Path) -> Iterator[RunCheck]:
    with chat_server(remote_reply) as server:

        def requested() -> list[SamplingValues]:
            return [
                (body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
                for body in server.bodies
            ]

        async def main(check: Check) -> None:
            config = RemoteConfig(model="friend", url=server.url, retries=0, timeout_s=5.0)
            client = RemoteClient(config, folder)
            try:
                await check(client, requested)
            finally:
                await client.aclose()

        yield lambda check: asyncio.run(main(check))


def chat(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def assert_complete(reply: PolicyReply, sampling: Sampling) -> None:
    """Assert the properties of every reply, with or without tokens."""
    completion = reply.completion
    assert reply.text
    assert completion.finish_reason in ("stop", "length")
    assert len(completion.token_ids) == len(completion.logprobs) <= sampling.max_tokens
    assert all(logprob <= 0 for logprob in completion.logprobs)
    ends = [0, *(span.end for span in completion.versions)]
    assert [span.start for span in completion.versions] == ends[:-1]
    assert ends[-1] == len(completion.token_ids)
    assert reply.trainable == bool(completion.token_ids) == bool(reply.prompt_ids)
    if reply.trainable:
        assert reply.text == Letters().decode(completion.token_ids)


def test_every_reply_is_sampled_with_the_settings_of_its_call(run_check: RunCheck) -> None:
    async def check(client: PolicyClient, requested: Callable[[], list[SamplingValues]]) -> None:
        replies = await asyncio.gather(
            *(
                client.say(chat(f"say {number}"), sampling)
                for number, sampling in enumerate(SAMPLINGS)
            )
        )
        for reply, sampling in zip(replies, SAMPLINGS, strict=True):
            assert_complete(reply, sampling)
        assert sorted(requested()) == sorted(map(sampling_values, SAMPLINGS))

    run_check(check)


def test_equal_prompts_and_seeds_have_equal_replies(run_check: RunCheck) -> None:
    async def check(client: PolicyClient, _: object) -> None:
        sampling = replace(SAMPLINGS[1], max_tokens=6)
        first = await client.say(chat("say it"), sampling)
        second = await client.say(chat("say it"), sampling)
        assert first.text == second.text
        assert first.completion.token_ids == second.completion.token_ids
        assert first.completion.logprobs == pytest.approx(second.completion.logprobs, abs=5e-5)

    run_check(check)


def test_a_refusal_is_an_engine_error_of_its_call_alone(run_check: RunCheck) -> None:
    async def check(client: PolicyClient, _: object) -> None:
        refusal, reply = await asyncio.gather(
            client.say(chat(REFUSED), SAMPLINGS[0]),
            client.say(chat("hi"), SAMPLINGS[1]),
            return_exceptions=True,
        )
        assert isinstance(refusal, EngineError)
        assert "\n" not in str(refusal)
        assert_complete(reply, SAMPLINGS[1])

    run_check(check)


def test_a_cancelled_call_does_not_disturb_others(run_check: RunCheck) -> None:
    async def check(client: PolicyClient, _: object) -> None:
        long_sampling = replace(SAMPLINGS[0], max_tokens=100)
        cancelled = asyncio.create_task(client.say(chat("slowly"), long_sampling))
        undisturbed = asyncio.create_task(client.say(chat("hi"), SAMPLINGS[1]))
        await asyncio.sleep(0)
        cancelled.cancel()
        # A scripted reply may have come before the cancellation.
        await asyncio.gather(cancelled, return_exceptions=True)
        assert_complete(await undisturbed, SAMPLINGS[1])
        assert_complete(await client.say(chat("and then"), SAMPLINGS[2]), SAMPLINGS[2])

    run_check(check)
