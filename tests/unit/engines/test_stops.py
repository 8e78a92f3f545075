"""Stop texts: a reply is cut at the first one and keeps its sampled tokens, streamed or not."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.engines import ChatState, EngineClient, PolicyReply, TokenCallback
from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Completion, Message, Sampling, VersionSpan
from tests.support.templates import byte_tokenizer, renderer_of

PROMPT = (Message(role="user", content="q"),)
TOOLS = (ToolSchema(name="f", description="", parameters={"type": "object", "properties": {}}),)
NO_LIMIT = 10**6


def make_completion(token_ids: Sequence[int], finish_reason: str) -> Completion:
    """Return a completion whose log-probabilities are the tokens' negative positions.

    The first two tokens are sampled by version 1 of the weights, and the others by version 2.
    """
    size = len(token_ids)
    versions = [VersionSpan(version=1, start=0, end=min(2, size))]
    if size > 2:
        versions.append(VersionSpan(version=2, start=2, end=size))
    return Completion(
        token_ids=tuple(token_ids),
        logprobs=tuple(-float(position) for position in range(size)),
        finish_reason=finish_reason,
        versions=tuple(versions),
    )


class WholeReplyEngine:
    """Engine that replies with given tokens and does not stream."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        is_cut = len(self.token_ids) > sampling.max_tokens
        reply = self.token_ids[: sampling.max_tokens]
        return make_completion(reply, "length" if is_cut else "stop")


class StreamingEngine(WholeReplyEngine):
    """Engine that streams its tokens in random parts.

    When the client wants no more, the engine samples up to five more tokens.

    Attributes:
        sampled: number of tokens of the latest reply.
    """

    def __init__(self, token_ids: Sequence[int], seed: int = 0) -> None:
        super().__init__(token_ids)
        self.sampled = 0
        self._random = random.Random(seed)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback
    ) -> Completion:
        reply = self.token_ids[: sampling.max_tokens]
        position = 0
        wants_more = True
        while wants_more and position < len(reply) - 1:  # the last token comes with the completion
            end = min(position + self._random.randint(1, 9), len(reply) - 1)
            wants_more = on_tokens(position, reply[position:end])
            position = end
        if not wants_more:
            self.sampled = min(len(reply), position + self._random.randint(0, 5))
            return make_completion(reply[: self.sampled], "abort")
        self.sampled = len(reply)
        is_cut = len(self.token_ids) > len(reply)
        return make_completion(reply, "length" if is_cut else "stop")


def get_reply(
    engine: Any,
    renderer: Renderer,
    stops: Sequence[str],
    *,
    max_tokens: int = NO_LIMIT,
    **chat: Any,
) -> PolicyReply:
    """Return the reply of a client to `PROMPT`; `chat` are more fields of the chat's state."""
    client = EngineClient(engine=engine, renderer=renderer)
    state = ChatState(id="c", stops=tuple(stops), **chat)
    return asyncio.run(client.say(PROMPT, Sampling(max_tokens=max_tokens, seed=5), state))


def spoken_text(raw: str, tools: bool) -> str:
    """Return the text outside thoughts and tool calls of a reply that begins with `raw`."""
    start = raw.lstrip()
    may_be_thought = "<think>".startswith(start[:7])
    if may_be_thought and "</think>" not in raw:
        return ""
    text = raw.split("</think>")[-1].lstrip()
    if not tools:
        return text
    return re.sub(r"(?s)<tool_call>.*?(</tool_call>|\Z)", "", text).lstrip()


def first_end(
    renderer: Renderer, token_ids: Sequence[int], stops: Sequence[str], tools: bool
) -> int:
    """Return the size of the shortest prefix whose spoken text has a stop; 0 if none has."""
    for size in range(1, len(token_ids) + 1):
        # an incomplete UTF-8 character decodes to U+FFFD
        raw = renderer.decode(token_ids[:size]).rstrip("\ufffd")
        text = spoken_text(raw, tools)
        if any(stop in text for stop in stops):
            return size
    return 0


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_a_reply_ends_at_its_shortest_prefix_with_a_stop_streamed_or_not(
    tmp_path: Path, tools: bool
) -> None:
    """300 random replies of thoughts, tool calls and text, some cut by `max_tokens`."""
    renderer = renderer_of("qwen3", tmp_path)
    rng = random.Random(1)
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "END"]
    pieces += "ab<é \n"
    stop_texts = ["END", "\n", "b", "<", "é"]
    if not tools:
        stop_texts += ["ab", " \n"]
    chat: dict[str, Any] = {"tools": TOOLS if tools else ()}

    stopped_replies = 0
    for number in range(300):
        text = rng.choice(["", "<think>"]) + "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        token_ids = (*renderer.encode(text), renderer.stop[0])
        stops = rng.sample(stop_texts, rng.randint(1, 2))
        max_tokens = rng.choice([NO_LIMIT, rng.randint(1, len(token_ids))])

        whole = get_reply(
            WholeReplyEngine(token_ids), renderer, stops, max_tokens=max_tokens, **chat
        )
        end = first_end(renderer, token_ids[:max_tokens], stops, tools)
        is_cut = max_tokens < len(token_ids)
        expected = make_completion(token_ids[:max_tokens], "length" if is_cut else "stop")
        if end:
            expected = expected.truncated(end, len(whole.prompt_ids))
            stopped_replies += 1
        assert whole.completion == expected, (text, stops, max_tokens)
        assert whole.text == renderer.decode(expected.token_ids)

        heard_texts: list[str] = []

        def hear(raw: str, form: Any, heard_texts: list[str] = heard_texts) -> bool:
            heard_texts.append(raw)
            return True

        for listener in (None, hear):
            engine = StreamingEngine(token_ids, number)
            streamed = get_reply(
                engine, renderer, stops, max_tokens=max_tokens, hear=listener, **chat
            )
            assert (streamed.text, streamed.raw) == (whole.text, whole.raw)
            assert streamed.completion.token_ids == expected.token_ids
            assert streamed.completion.logprobs == expected.logprobs
            assert streamed.completion.finish_reason == expected.finish_reason
            assert streamed.completion.versions == expected.versions
            if end:  # the engine stops after the part that has the stop, and up to 5 more tokens
                assert engine.sampled <= end + 9 + 5
        assert all(whole.text.startswith(raw) for raw in heard_texts)
    assert 60 < stopped_replies < 240


def test_a_token_with_a_stop_inside_is_kept_whole(tmp_path: Path) -> None:
    """The tokens are a, E, NDx, y."""
    byte_tokenizer(
        tmp_path,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [("N", "D"), ("ND", "x")],
        eos_token="<|im_end|>",
    )
    renderer = Renderer(tmp_path, template="chatml")
    token_ids = renderer.encode("aENDxy")
    assert [renderer.decode([token]) for token in token_ids] == ["a", "E", "NDx", "y"]
    for engine in (WholeReplyEngine(token_ids), StreamingEngine(token_ids)):
        assert get_reply(engine, renderer, ["END"]).text == "aENDx"
        assert get_reply(engine, renderer, ["NDxyz"]).text == "aENDxy"


def test_a_reply_that_was_sampled_again_ends_at_its_own_stop(tmp_path: Path) -> None:
    """A server that samples without seeds was lost, after the client had stopped its first reply."""
    renderer = renderer_of("qwen3", tmp_path)

    class RestartedEngine(StreamingEngine):
        async def stream(
            self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback
        ) -> Completion:
            on_tokens(0, renderer.encode("aEND"))
            return await self.generate(prompt_ids, sampling)

    engine = RestartedEngine(renderer.encode("so it isEND?"))
    assert get_reply(engine, renderer, ["END"]).text == "so it isEND"
    engine = RestartedEngine(renderer.encode("never"))
    assert get_reply(engine, renderer, ["END"]).text == "never"
