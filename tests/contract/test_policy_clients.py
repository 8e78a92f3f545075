"""An engine, canned replies and a remote model all keep the promises of `rollout.engines.PolicyClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
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

REFUSED = "x" * (MAX_LENGTH + 1)  # too long for an engine; the others are made to refuse it
SAMPLINGS = (
    Sampling(temperature=0.3, top_p=0.5, max_tokens=5, seed=1),
    Sampling(temperature=1.0, top_p=0.9, max_tokens=9, seed=2),
    Sampling(temperature=0.0, max_tokens=2, seed=3),
)


class Letters:
    """A renderer with a token for every letter, and none that stops."""

    stop = ()

    def render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return tuple(byte % 96 for message in messages for byte in message.content.encode())

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(32 + token) for token in token_ids)


def canned(prompt: tuple[int, ...], call: int) -> list[int]:
    if len(prompt) > MAX_LENGTH:
        raise EngineError("the script refuses")
    return [*prompt, 7]


def served(body: dict[str, Any], number: int) -> Response:
    text = body["messages"][-1]["content"]
    return (
        Response(b"too long", status=400)
        if text == REFUSED
        else says(f"I heard {text}.", delay_s=0.05)
    )


Open = Callable[[Any], Any]


@pytest.fixture(params=["embedded_local", "scripted", "external"])
def voiced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Runs a function of (client, what it was asked so far)."""
    if request.param == "external":
        with chat_server(served) as server:

            async def play(function: Any) -> Any:
                config = RemoteConfig(model="friend", url=server.url, retries=0, timeout_s=5.0)
                client = RemoteClient(config, tmp_path)
                try:
                    return await function(client, lambda: [_asked(body) for body in server.bodies])
                finally:
                    await client.aclose()

            yield lambda function: asyncio.run(play(function))
        return
    if request.param == "scripted":
        engine = ScriptedEngine(canned)

        def samplings():
            return [(s.temperature, s.top_p, s.max_tokens, s.seed) for _, s in engine.calls]
    else:
        make_model(0).save_pretrained(tmp_path)
        engine = LocalEngine(EmbeddedEngine.from_folder(tmp_path, max_length=MAX_LENGTH, rows=8))
        heard: list[Sampling] = []
        submit = engine.core.submit

        def listen(number: int, prompt: Any, sampling: Sampling, **keywords: Any) -> None:
            heard.append(sampling)
            submit(number, prompt, sampling, **keywords)

        engine.core.submit = listen
        samplings = lambda: [(s.temperature, s.top_p, s.max_tokens, s.seed) for s in heard]  # noqa: E731
    player = build_player(engine, Letters())
    yield lambda function: asyncio.run(function(player, samplings))


def _asked(body: dict[str, Any]) -> tuple[float, float, int, int]:
    return body["temperature"], body["top_p"], body["max_tokens"], body["seed"]


def chat(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def whole(said: PolicyReply, sampling: Sampling) -> None:
    """What every reply is, with or without tokens."""
    completion = said.completion
    assert said.text
    assert completion.finish_reason in ("stop", "length")
    assert len(completion.token_ids) == len(completion.logprobs) <= sampling.max_tokens
    assert all(value <= 0 for value in completion.logprobs)
    ends = [0, *(span.end for span in completion.versions)]
    assert [span.start for span in completion.versions] == ends[:-1]
    assert ends[-1] == len(completion.token_ids)
    assert said.trainable == bool(completion.token_ids) == bool(said.prompt_ids)
    if said.trainable:
        assert said.text == Letters().decode(completion.token_ids)


def test_every_reply_is_sampled_as_its_agent_wants(voiced: Open) -> None:
    async def run(client: PolicyClient, asked: Any) -> None:
        replies = await asyncio.gather(
            *(client.say(chat(f"say {n}"), s) for n, s in enumerate(SAMPLINGS))
        )
        for said, sampling in zip(replies, SAMPLINGS, strict=True):
            whole(said, sampling)
        assert sorted(asked()) == sorted(
            (s.temperature, s.top_p, s.max_tokens, s.seed) for s in SAMPLINGS
        )

    voiced(run)


def test_equal_questions_and_seeds_have_equal_answers(voiced: Open) -> None:
    async def run(client: PolicyClient, asked: Any) -> None:
        again = replace(SAMPLINGS[1], max_tokens=6)
        first, second = [await client.say(chat("say it"), again) for _ in range(2)]
        assert (first.text, first.completion.token_ids) == (
            second.text,
            second.completion.token_ids,
        )
        assert first.completion.logprobs == pytest.approx(second.completion.logprobs, abs=5e-5)

    voiced(run)


def test_a_refusal_is_an_engine_error_and_the_askers_alone(voiced: Open) -> None:
    async def run(client: PolicyClient, asked: Any) -> None:
        refused, said = await asyncio.gather(
            client.say(chat(REFUSED), SAMPLINGS[0]),
            client.say(chat("hi"), SAMPLINGS[1]),
            return_exceptions=True,
        )
        assert isinstance(refused, EngineError)
        assert "\n" not in str(refused)
        whole(said, SAMPLINGS[1])

    voiced(run)


def test_who_leaves_disturbs_nobody(voiced: Open) -> None:
    async def run(client: PolicyClient, asked: Any) -> None:
        leaves = asyncio.create_task(
            client.say(chat("slowly"), replace(SAMPLINGS[0], max_tokens=100))
        )
        stays = asyncio.create_task(client.say(chat("hi"), SAMPLINGS[1]))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)  # a canned reply may have been faster
        whole(await stays, SAMPLINGS[1])
        whole(await client.say(chat("and then"), SAMPLINGS[2]), SAMPLINGS[2])

    voiced(run)
