"""A text that ends replies: the tokens up to it are kept as they were sampled, however the engine tells of them."""

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
from rollout.models.reply_text import ReplyText
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Completion, Message, Sampling, VersionSpan
from tests.support.templates import byte_tokenizer, renderer_of

ASKED = (Message(role="user", content="q"),)
TOOLS = (ToolSchema(name="f", description="", parameters={"type": "object", "properties": {}}),)


def completion(ids: Sequence[int], reason: str) -> Completion:
    """One whose log-probabilities tell the tokens' places, sampled by version 1 and from the third token on by 2."""
    ends = [(1, min(2, len(ids))), (2, len(ids))] if len(ids) > 2 else [(1, len(ids))]
    starts = [0, *(end for _, end in ends)]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(-float(place) for place in range(len(ids))),
        finish_reason=reason,
        versions=tuple(
            VersionSpan(version=v, start=s, end=e) for s, (v, e) in zip(starts, ends, strict=False)
        ),
    )


class Whole:
    """An engine that says `ids`, and cannot tell of them before."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        cut = len(self.ids) > sampling.max_tokens
        return completion(self.ids[: sampling.max_tokens], "length" if cut else "stop")


class Parts(Whole):
    """One that tells of random parts of them, and notices some tokens later that nobody wants more."""

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        super().__init__(ids)
        self.sampled = 0  # tokens of the latest reply
        self.random = random.Random(seed)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, hear: TokenCallback
    ) -> Completion:
        ids = self.ids[: sampling.max_tokens]
        position = 0
        wanted = True
        while wanted and position < len(ids) - 1:  # the last token comes with the reply
            part = ids[position : min(position + self.random.randint(1, 9), len(ids) - 1)]
            wanted = hear(position, part)
            position += len(part)
        if not wanted:
            self.sampled = min(len(ids), position + self.random.randint(0, 5))
            return completion(ids[: self.sampled], "abort")
        self.sampled = len(ids)
        return completion(ids, "length" if len(self.ids) > len(ids) else "stop")


def said(
    engine: Any, renderer: Renderer, stops: Sequence[str], *, max_tokens: int = 10**6, **chat: Any
) -> PolicyReply:
    client = EngineClient(engine=engine, renderer=renderer)
    state = ChatState(id="c", stops=tuple(stops), **chat)
    return asyncio.run(client.say(ASKED, Sampling(max_tokens=max_tokens, seed=5), state))


def spoken(raw: str, tools: bool) -> str:
    """What a reply that begins with `raw` says outside of thoughts and calls."""
    if raw.lstrip()[:7] == "<think>"[: len(raw.lstrip())] and "</think>" not in raw:
        return ""
    text = raw.split("</think>")[-1].lstrip()
    return re.sub(r"(?s)<tool_call>.*?(</tool_call>|\Z)", "", text).lstrip() if tools else text


def first_end(renderer: Renderer, ids: Sequence[int], stops: Sequence[str], tools: bool) -> int:
    """Tokens of the shortest prefix whose text has a stop; 0: none has."""
    for size in range(1, len(ids) + 1):
        raw = renderer.decode(ids[:size]).rstrip("\ufffd")  # the first byte of two is no sign yet
        if any(stop in spoken(raw, tools) for stop in stops):
            return size
    return 0


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_a_reply_ends_at_its_shortest_prefix_with_a_stop_however_it_comes(
    tmp_path: Path, tools: bool
) -> None:
    """300 random replies of thoughts, calls and words, whole and in random parts, and cut by `max_tokens` or not."""
    renderer, draw = renderer_of("qwen3", tmp_path), random.Random(1)
    pieces = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"}',
        "END",
        *"ab<é \n",
    ]
    ended = 0
    for number in range(300):
        text = draw.choice(["", "<think>"]) + "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        ids = (*renderer.encode(text), renderer.stop[0])
        stops = draw.sample(
            ["END", "\n", "b", "<", "é", *([] if tools else ["ab", " \n"])], draw.randint(1, 2)
        )
        most = draw.choice([10**6, draw.randint(1, len(ids))])
        chat: Any = {"tools": TOOLS if tools else ()}
        whole = said(Whole(ids), renderer, stops, max_tokens=most, **chat)
        end = first_end(renderer, ids[:most], stops, tools)
        expected = completion(ids[:most], "length" if most < len(ids) else "stop")
        expected = expected.truncated(end, len(whole.prompt_ids)) if end else expected
        assert whole.completion == expected, (text, stops, most)
        assert whole.text == renderer.decode(expected.token_ids)
        heard: list[str] = []
        for hear in (None, lambda raw, form, heard=heard: heard.append(raw) is None):
            parts = Parts(ids, number)
            told = said(parts, renderer, stops, max_tokens=most, hear=hear, **chat)
            assert (told.text, told.raw, told.completion.token_ids) == (
                whole.text,
                whole.raw,
                expected.token_ids,
            )
            assert told.completion.logprobs == expected.logprobs
            assert told.completion.finish_reason == expected.finish_reason
            assert told.completion.versions == expected.versions
            assert not end or parts.sampled <= end + 9 + 5  # and its sampling ends
        assert all(whole.text.startswith(raw) for raw in heard)
        ended += bool(end)
    assert 60 < ended < 240


def test_a_stop_inside_of_a_token_keeps_the_whole_of_it(tmp_path: Path) -> None:
    """The tokens are a, E, NDx, y."""
    byte_tokenizer(
        tmp_path,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [("N", "D"), ("ND", "x")],
        eos_token="<|im_end|>",
    )
    renderer = Renderer(tmp_path, template="chatml")
    ids = renderer.encode("aENDxy")
    assert [renderer.decode([token]) for token in ids] == ["a", "E", "NDx", "y"]
    for engine in (Whole(ids), Parts(ids)):
        assert said(engine, renderer, ["END"]).text == "aENDx"
        assert said(engine, renderer, ["NDxyz"]).text == "aENDxy"


def test_a_thought_that_the_prompt_begins_has_no_stop(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    words = ReplyText(renderer, renderer.encode("<think>\n"), calls=False, stops=["END"])
    assert words.add(0, renderer.encode("END </think> so END")) == "<think>END </think> so END"
    assert words.end == len("END </think> so END")
    words.add(0, renderer.encode("END"))
    assert words.end == 0


def test_a_reply_that_began_anew_where_nobody_heard_of_it_ends_at_a_stop_of_its_own(
    tmp_path: Path,
) -> None:
    """As of a server that is lost after it was told to end, and draws without seeds."""
    renderer = renderer_of("qwen3", tmp_path)

    class Lost(Parts):
        async def stream(
            self, prompt_ids: Sequence[int], sampling: Sampling, hear: TokenCallback
        ) -> Completion:
            hear(0, renderer.encode("aEND"))
            return await self.generate(prompt_ids, sampling)

    assert said(Lost(renderer.encode("so it isEND?")), renderer, ["END"]).text == "so it isEND"
    assert said(Lost(renderer.encode("never")), renderer, ["END"]).text == "never"
