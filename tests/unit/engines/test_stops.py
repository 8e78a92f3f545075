"""A chat's stops end a reply: tokens up to the stop stay as sampled, however the engine reports them."""

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

QUESTION = (Message(role="user", content="q"),)
TOOLS = (ToolSchema(name="f", description="", parameters={"type": "object", "properties": {}}),)
UNLIMITED = 10**6
MAX_PART = 9  # tokens that an engine reports at once
MAX_DELAY = 5  # tokens that an engine samples before it notices that the reply should end


def make_completion(token_ids: Sequence[int], finish_reason: str) -> Completion:
    """Return a completion whose log-probabilities are the negative positions of its tokens.

    The first two tokens are of version 1, the others of version 2.
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
    """Engine that returns fixed tokens, and cannot stream."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        is_cut = len(self.token_ids) > sampling.max_tokens
        return make_completion(
            self.token_ids[: sampling.max_tokens], "length" if is_cut else "stop"
        )


class StreamingEngine(WholeReplyEngine):
    """Engine that streams fixed tokens in random parts, and ends a reply some tokens late.

    Attributes:
        sampled: number of tokens of the latest reply.
    """

    def __init__(self, token_ids: Sequence[int], seed: int = 0) -> None:
        super().__init__(token_ids)
        self.sampled = 0
        self._random = random.Random(seed)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, report: TokenCallback
    ) -> Completion:
        token_ids = self.token_ids[: sampling.max_tokens]
        last = len(token_ids) - 1  # the last token comes with the completion
        position = 0
        continues = True
        while continues and position < last:
            end = min(position + self._random.randint(1, MAX_PART), last)
            continues = report(position, token_ids[position:end])
            position = end
        if not continues:
            self.sampled = min(len(token_ids), position + self._random.randint(0, MAX_DELAY))
            return make_completion(token_ids[: self.sampled], "abort")
        self.sampled = len(token_ids)
        return await self.generate(prompt_ids, sampling)


def sample_reply(
    engine: Any,
    renderer: Renderer,
    stops: Sequence[str],
    *,
    max_tokens: int = UNLIMITED,
    **chat: Any,
) -> PolicyReply:
    """Return an engine's reply in a chat with these stops."""
    client = EngineClient(engine=engine, renderer=renderer)
    state = ChatState(id="c", stops=tuple(stops), **chat)
    return asyncio.run(client.say(QUESTION, Sampling(max_tokens=max_tokens, seed=5), state))


def text_outside_thoughts_and_calls(raw: str, has_tools: bool) -> str:
    """Return the text of an incomplete reply in which stops count, found by regular expressions."""
    start = raw.lstrip()
    may_be_thoughts = "<think>".startswith(start[:7])
    if may_be_thoughts and "</think>" not in raw:
        return ""
    text = raw.split("</think>")[-1].lstrip()
    if has_tools:
        text = re.sub(r"(?s)<tool_call>.*?(</tool_call>|\Z)", "", text).lstrip()
    return text


def expected_end(
    renderer: Renderer, token_ids: Sequence[int], stops: Sequence[str], has_tools: bool
) -> int:
    """Return the number of tokens of the shortest prefix whose text has a stop; 0 without one."""
    for size in range(1, len(token_ids) + 1):
        # The first byte of a character of two bytes is decoded as a replacement character.
        raw = renderer.decode(token_ids[:size]).rstrip("\ufffd")
        text = text_outside_thoughts_and_calls(raw, has_tools)
        if any(stop in text for stop in stops):
            return size
    return 0


@pytest.mark.parametrize("has_tools", [False, True], ids=["text", "tools"])
def test_a_reply_ends_at_its_shortest_prefix_with_a_stop(tmp_path: Path, has_tools: bool) -> None:
    """300 random replies of thoughts, calls and text, complete and streamed, also cut by max_tokens."""
    renderer = renderer_of("qwen3", tmp_path)
    draw = random.Random(1)
    pieces = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"}',
        "END",
        *"ab<é \n",
    ]
    possible_stops = ["END", "\n", "b", "<", "é"]
    if not has_tools:
        possible_stops += ["ab", " \n"]
    tools = TOOLS if has_tools else ()

    ended_replies = 0
    for number in range(300):
        text = draw.choice(["", "<think>"]) + "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        token_ids = (*renderer.encode(text), renderer.stop[0])
        stops = draw.sample(possible_stops, draw.randint(1, 2))
        max_tokens = draw.choice([UNLIMITED, draw.randint(1, len(token_ids))])

        whole = sample_reply(
            WholeReplyEngine(token_ids), renderer, stops, max_tokens=max_tokens, tools=tools
        )
        is_cut = max_tokens < len(token_ids)
        expected = make_completion(token_ids[:max_tokens], "length" if is_cut else "stop")
        end = expected_end(renderer, token_ids[:max_tokens], stops, has_tools)
        if end:
            expected = expected.stopped_after(end, len(whole.prompt_ids))
            ended_replies += 1
        assert whole.completion == expected, (text, stops, max_tokens)
        assert whole.text == renderer.decode(expected.token_ids)

        streamed_texts: list[str] = []

        def record(raw: str, form: str, texts: list[str] = streamed_texts) -> bool:
            texts.append(raw)
            return True

        for on_text in (None, record):
            engine = StreamingEngine(token_ids, seed=number)
            streamed = sample_reply(
                engine, renderer, stops, max_tokens=max_tokens, tools=tools, on_text=on_text
            )
            assert streamed.text == whole.text
            assert streamed.raw == whole.raw
            assert streamed.completion.token_ids == expected.token_ids
            assert streamed.completion.logprobs == expected.logprobs
            assert streamed.completion.finish_reason == expected.finish_reason
            assert streamed.completion.versions == expected.versions
            if end:
                assert engine.sampled <= end + MAX_PART + MAX_DELAY
        assert all(whole.text.startswith(text) for text in streamed_texts)
    assert 60 < ended_replies < 240


def test_a_stop_inside_a_token_keeps_the_whole_token(tmp_path: Path) -> None:
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
        assert sample_reply(engine, renderer, ["END"]).text == "aENDx"
        assert sample_reply(engine, renderer, ["NDxyz"]).text == "aENDxy"


@pytest.mark.parametrize(
    ("second_reply", "text"), [("so it isEND?", "so it isEND"), ("never", "never")]
)
def test_a_reply_that_is_sampled_again_ends_at_its_own_stop(
    tmp_path: Path, second_reply: str, text: str
) -> None:
    """A server may be lost after it has streamed a stop; another samples the reply without a seed."""
    renderer = renderer_of("qwen3", tmp_path)

    class EngineThatIsLost(WholeReplyEngine):
        async def stream(
            self, prompt_ids: Sequence[int], sampling: Sampling, report: TokenCallback
        ) -> Completion:
            report(0, renderer.encode("aEND"))
            return await self.generate(prompt_ids, sampling)

    engine = EngineThatIsLost(renderer.encode(second_reply))
    assert sample_reply(engine, renderer, ["END"]).text == text
