"""Rollout engines: their section of a config, their protocol, and the client that answers an agent's chat by one.

- `embedded`  continuous batching in plain torch, in this process or in a Ray actor
- `sglang`    SGLang servers, over HTTP
- `remote`    no engine: frozen models behind an API, in text only
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from rollout.base.deadlines import LateCall, with_deadline
from rollout.base.errors import EngineError, PromptTooLong
from rollout.base.http import Url, check_private
from rollout.base.lookup import lookup, lookup_import
from rollout.base.section import Section
from rollout.base.signatures import check_call, check_methods
from rollout.engines.protocol import Engine as Engine
from rollout.engines.protocol import Tag as Tag
from rollout.engines.protocol import TokenCallback as TokenCallback
from rollout.engines.protocol import TrainedEngine as TrainedEngine
from rollout.engines.sglang.arguments import argument_problem, graph_problem
from rollout.models.chat_template import CUTS, Renderer, WordStream
from rollout.models.tool_calls import ToolFormat, ToolSchema
from rollout.records.trajectory import Completion, Message, Sampling, Turn
from rollout.sync.transport import REMOVED_TRANSPORTS

# Import paths, so that naming an engine imports neither torch nor Ray.
ENGINES = {
    "embedded": "rollout.engines.embedded.engine:HostedEngine",
    "embedded_replicas": "rollout.engines.embedded.replicas:ReplicatedEngine",
    "embedded_local": "rollout.engines.embedded.batching:LocalEngine",
    "sglang": "rollout.engines.sglang.engine:SGLangEngine",
}
engine_class = partial(lookup_import, "engine", paths=ENGINES)  # of a name

TRANSPORTS = {  # of each engine that is trained, its default first; see `rollout.sync`
    "embedded": ("shared", "disk"),
    "sglang": ("disk", "tensor", "distributed"),
}
_TRAINED = {
    "async generate": ("prompt_ids", "sampling"),
    "async begin_update": (),
    "async commit_update": ("update",),
}
_TRAINED |= {
    "abort_update": ("error",),
    "async weights_lost": (),
}  # without what `TrainedEngine` may do besides


_LEAST_START_S, _READ_PER_S = (
    900.0,
    1e8,
)  # without reading the model; bytes of it, from a busy network file system
_LEAST_REQUEST_S = 600.0
_LEAST_TOKENS_PER_S = (
    2000.0  # of a server; of a 32B on eight H100s some 6000 where 256 decode at 25 tokens/s each
)


class StreamingEngine(Protocol):
    """An engine that can tell tokens as they are sampled."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion (see `Engine`)."""
        return await self.stream(prompt_ids, sampling, None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, hear: TokenCallback | None
    ) -> Completion:
        """As `generate`, telling `hear` of the tokens before the completion is whole."""
        raise NotImplementedError


class EngineConfig(Section):
    """Where each policy's tokens are sampled."""

    name: str = "embedded"  # in ENGINES
    slots: int = Field(128, ge=1)  # requests decoded at once
    max_length: int = Field(512, ge=2)  # tokens of prompt and reply
    # what is cut of the last message of a prompt without room for its reply; wrong: nothing, the trajectory fails
    overlong_prompts: Literal["wrong", "left", "middle", "right"] = "wrong"
    device: Literal["cpu", "cuda"] = "cpu"  # that the embedded engine computes on
    deterministic: bool = (
        False  # a reply has the same bits in any batch: a run is then repeated to the bit
    )
    router_replay: bool = (
        False  # trainers send tokens to the experts of a mixture that the engine chose
    )
    transport: str | None = None  # of new weights; None: the engine's own
    weights_folder: Path | None = (
        None  # folder that trainer and engine see; None: one in shared memory
    )
    sleep: bool = False  # give memory away while policies are trained
    restarts: int = Field(2, ge=0)  # of an engine that dies or hangs, in an hour
    replicas: int = Field(1, ge=1)  # servers per policy, or actors of the embedded engine
    joining: int = Field(
        0, ge=0
    )  # further actors, which join where nodes have room and leave with their nodes
    # of name: sglang
    python: Path | None = None  # interpreter of SGLang's own environment ...
    urls: tuple[Url, ...] = ()  # ... or servers that run already
    members: Path | None = (
        None  # file with the URLs of further servers, which may change while a run trains
    )
    key_file: Path | None = None  # of servers on other machines
    tp: int = Field(1, ge=1)  # GPUs of each
    # of a policy with lora: its merged weights, or its adapter beside the frozen model, which is there once
    adapters: Literal["merged", "slots"] = "merged"
    options: dict[str, JsonValue] = Field(
        default_factory=dict
    )  # further arguments of sglang.launch_server
    environment: dict[str, str] = Field(default_factory=dict)  # variables of the servers
    verify: bool = True  # compare the servers' checksums with each other after every update
    timeout_s: float | None = Field(
        None, gt=0
    )  # of one request; None: what a server with all slots full may need
    start_s: float | None = Field(
        None, gt=0
    )  # that a server may take to answer first; None: by its model's size

    def ready_s(self, model: str | Path) -> float:
        """Seconds that a server of the model in this folder may take to answer first."""
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        return self.start_s or _LEAST_START_S + size / _READ_PER_S

    @field_validator("options")
    @classmethod
    def _taken(cls, options: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        if info.data.get("name") == "sglang" and (problem := argument_problem(options)):
            raise ValueError(problem)
        return options

    @property
    def servers(self) -> int:
        """How many decode for each policy."""
        return len(self.urls) or self.replicas

    @property
    def request_s(self) -> float:
        """Seconds that one request may take: ten minutes, or as long as its server takes for a reply in every slot."""
        return self.timeout_s or max(
            _LEAST_REQUEST_S, self.slots * self.max_length / _LEAST_TOKENS_PER_S
        )

    @model_validator(mode="after")
    def _usable(self) -> EngineConfig:
        made: Any = lookup("engine", self.name, ENGINES)
        if self.name not in ENGINES:
            check_call(
                f"engine '{self.name}'", made, ("model",), keywords=("rows", "max_length", "place")
            )
            check_methods(f"engine '{self.name}'", made, _TRAINED if isinstance(made, type) else {})
        if self.name == "sglang" and not self.python and not self.urls:
            raise ValueError(
                "sglang needs python, the interpreter of its own environment (requirements/sglang.txt), or urls"
            )
        if self.name != "sglang" and (self.python or self.urls or self.members or self.options):
            raise ValueError(
                "python, urls, members and options are settings of sglang; set name: sglang"
            )
        saves = self.name == "sglang" and self.sleep and not self.urls
        if saves and (problem := graph_problem(self.options, self.environment)):
            raise ValueError(f"environment: {problem}")
        fits = (
            self.name == "sglang"
            and self.transport in (None, "disk")
            and not (self.members or self.sleep)
        )
        if self.adapters == "slots" and not fits:
            raise ValueError(
                "adapters: slots is of name: sglang with transport: disk, without sleep and members"
            )
        if self.joining and self.name == "sglang":
            raise ValueError(
                "joining is a setting of the embedded engine; servers that join are named in members"
            )
        if self.name == "sglang" and self.device != "cpu":
            raise ValueError(
                "device is a setting of the embedded engine; sglang takes the GPUs there are"
            )
        for url in self.urls if self.key_file else ():
            check_private("urls", url)
        known = TRANSPORTS.get(self.name)
        if known and self.transport not in (None, *known):
            raise ValueError(unknown_transport(self.name, self.transport))
        if self.router_replay and not known:
            raise ValueError(
                f"router_replay: '{self.name}' does not say which experts it chose; use {' or '.join(TRANSPORTS)}"
            )
        return self


def unknown_transport(engine: str, transport: str | None) -> str:
    """Return the error message for a transport that an engine does not have."""
    if transport in REMOVED_TRANSPORTS:
        return f"transport '{transport}' was removed; use {REMOVED_TRANSPORTS[transport]}"
    return f"{engine} has no transport '{transport}'; known: {', '.join(TRANSPORTS[engine])}"


def problem_of(
    prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int, max_length: int
) -> str:
    """Why an engine with `vocab_size` and `max_length` cannot serve the request; "" if it can."""
    size = len(prompt_ids)
    if not size:
        return "the prompt is empty; expected at least one token"
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        return (
            f"the prompt has token ids outside 0..{vocab_size - 1}; is it from another tokenizer?"
        )
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; expected at least 1"
    if size + sampling.max_tokens > max_length:
        return (
            f"prompt of {size} tokens and max_tokens {sampling.max_tokens} exceed the engine's max_length "
            f"{max_length}; shorten the prompt or raise max_length"
        )
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}; expected 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return f"top_p is {sampling.top_p} and top_k {sampling.top_k}; expected 0 < top_p <= 1 and top_k >= 0"
    return ""


_STOP_CHECK_TOKENS = 16  # sampled tokens between two checks of a reply for the stops of its chat
_OFF_LOOP_CHARS = 4_000  # of a chat's messages and tools, from which on another thread renders them
_TOOL_CHARS = 500  # that a tool counts as, whose schema nobody has written down yet
_renderings = ThreadPoolExecutor(
    1, "renderings"
)  # one: the event loop then waits for no more than one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatState:
    """What a policy is told of a chat that goes on, besides its messages."""

    id: str  # in its trajectory
    tools: tuple[ToolSchema, ...] = ()  # the same in every turn
    before: Turn | None = None  # its latest turn
    # gets the text of the reply so far, with tool calls and thoughts; returns whether to go on
    hear: Callable[[str, ToolFormat], bool] | None = None
    stops: tuple[str, ...] = ()  # texts that end the reply, outside of its thoughts and calls


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """What a policy said in a chat."""

    text: str
    prompt_ids: tuple[int, ...]  # [P]
    completion: Completion
    trainable: bool = True  # False: there are no tokens, only text
    shown: tuple[Message, ...] | None = None  # of a chat that was too long, what was left of it
    raw: str | None = (
        None  # the text with special tokens and without its end, of a chat that goes on
    )
    tool_format: ToolFormat = "fenced"  # in which it calls tools
    root: bool = False  # the chat's tokens could not go on from its latest turn's


class PolicyClient(Protocol):
    """A policy's rollout side, as a seat needs it."""

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """Go on with a chat; `chat` is None where it is the only reply.

        Raises:
            EngineError: no reply can be had; `PromptTooLong` that there is no room for one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClient:
    """The client of a policy that trains here: where its tokens come from and how its chats are written."""

    engine: Engine
    renderer: Renderer
    slots: AbstractAsyncContextManager[object] = field(
        default_factory=nullcontext
    )  # a semaphore bounds its calls
    deadline_s: float | None = None  # of a reply, once it has a slot
    max_length: int | None = (
        None  # tokens of prompt and reply; None: the engine refuses what is longer
    )
    overlong_prompts: str = (
        "wrong"  # what becomes of a prompt without room for its reply, see `render_within`
    )

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """Go on with a chat, token by token (see `PolicyClient`); `LateCall` if no reply came in time."""
        room = None if self.max_length is None else self.max_length - sampling.max_tokens
        shown, root = messages, False
        if chat is not None:
            prompt_ids, root = await self._chat_prompt(messages, chat, room)
        else:
            shown, prompt_ids = render_within(self.renderer, messages, room, self.overlong_prompts)
        sampling = replace(sampling, stop=self.renderer.stop)
        completion = await self._completion(prompt_ids, sampling, chat)
        return PolicyReply(
            text=self.renderer.decode(completion.token_ids),
            prompt_ids=tuple(prompt_ids),
            completion=completion,
            shown=None if shown is messages else tuple(shown),
            raw=None if chat is None else self.renderer.decode_raw(completion.token_ids),
            tool_format="fenced" if chat is None else self.renderer.tool_format,
            root=root,
        )

    async def _completion(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, chat: ChatState | None
    ) -> Completion:
        """The engine's completion, of which the chat hears as it grows where the engine can tell.

        It ends with the token that completes a stop of the chat, wherever the engine has noticed that and ended.
        """
        heard: list[int] = []
        given_up = False
        tell, stops = (chat.hear, chat.stops) if chat else (None, ())
        words = None
        if chat and (tell or stops):
            words = WordStream(self.renderer, prompt_ids, calls=bool(chat.tools), stops=stops)

        def hear(position: int, token_ids: Sequence[int]) -> bool:
            nonlocal given_up
            assert words
            heard[position:] = token_ids
            text = words.add(position, token_ids)
            given_up = tell is not None and not tell(text, self.renderer.tool_format)
            return not given_up and not words.end

        async with self.slots:
            engine: Any = self.engine
            if words and hasattr(engine, "stream"):  # a `StreamingEngine`
                every = 1 if tell else _STOP_CHECK_TOKENS
                reply = engine.stream(prompt_ids, sampling, TokenCallback(hear, every))
            else:
                reply = engine.generate(prompt_ids, sampling)
            completion: Completion = await with_deadline(self.deadline_s, reply, LateCall)
        if words and stops:
            known = (
                len(heard) if completion.token_ids[: len(heard)] == tuple(heard) else 0
            )  # else it began anew
            words.add(known, completion.token_ids[known:])
            completion = completion.ended(words.end, len(prompt_ids)) if words.end else completion
        if completion.finish_reason == "abort" and not given_up:
            raise EngineError(
                f"the engine gave the reply up after {len(completion.token_ids)} tokens"
            )
        return completion

    async def _chat_prompt(
        self, messages: Sequence[Message], chat: ChatState, room: int | None
    ) -> tuple[tuple[int, ...], bool]:
        """A chat's prompt [P], and whether its tokens begin anew. Long ones are made off the event loop."""
        prompt = partial(self.renderer.go_on, chat.before, messages, chat.tools)
        size = sum(message.size for message in messages) + _TOOL_CHARS * len(chat.tools)
        far = size > _OFF_LOOP_CHARS
        ids, root = (
            await asyncio.get_running_loop().run_in_executor(_renderings, prompt)
            if far
            else prompt()
        )
        if room is not None and len(ids) > room:
            raise PromptTooLong(
                f"chat {chat.id}: prompt of {len(ids)} tokens, and there is room for {room}"
            )
        return ids, root


async def prompt_tokens(policy: PolicyClient, messages: Sequence[Message], chat: ChatState) -> int:
    """How many tokens the prompt has by which a chat goes on; EngineError if nobody here knows the model's tokens."""
    if not isinstance(policy, EngineClient):
        raise EngineError("its model is behind an API, and nobody here knows its tokens")
    prompt_ids, _ = await policy._chat_prompt(messages, chat, None)
    return len(prompt_ids)


def render_within(
    renderer: Renderer, messages: Sequence[Message], most: int | None, rule: str
) -> tuple[Sequence[Message], tuple[int, ...]]:
    """A chat and its token ids [P], at most `most` of them (None: any): one that is longer has its last message cut.

    Args:
        rule: a name in `CUTS`, the side of the message that is cut away; any other refuses.

    Raises:
        PromptTooLong: it is longer, and not to be cut or too long without the last message too.
    """
    ids = renderer.render(messages)
    if most is None or len(ids) <= most:
        return messages, ids
    size = len(ids)
    if rule in CUTS:
        *before, last = messages
        text = renderer.encode(last.content)
        left = len(text) - (size - most)
        while left > 0:
            cut = (*before, replace(last, content=renderer.decode(CUTS[rule](text, left))))
            ids = renderer.render(cut)
            if len(ids) <= most:
                return cut, ids
            left -= len(ids) - most  # where the text was cut, other tokens may come about
    raise PromptTooLong(f"prompt of {size} tokens, and there is room for {most}")
