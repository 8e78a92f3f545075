"""Client of a policy whose tokens an engine samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rollout.base.deadlines import LateCall, with_deadline
from rollout.base.errors import EngineError, PromptTooLong
from rollout.base.terminal import say
from rollout.engines.policy_client import ChatState, PolicyClient, PolicyReply
from rollout.engines.prompt_length import fit_prompt
from rollout.engines.protocol import Engine, TokenCallback
from rollout.engines.rendering import render_chat
from rollout.models.chat_template import Renderer
from rollout.models.grammars import GrammarError
from rollout.models.reply_text import ReplyText
from rollout.records.trajectory import Completion, Message, Sampling

_STOP_CHECK_TOKENS = 16  # sampled tokens between two checks of a reply for the stops of its chat


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClient:
    """`PolicyClient` that renders chats to tokens and has an engine sample the replies.

    Attributes:
        slots: context manager around each call, such as a semaphore that bounds the concurrent calls.
        deadline_s: seconds that a reply may take once the call has a slot; None: no deadline.
        max_length: maximum number of tokens of prompt and reply; None: only the engine has a limit.
        overlong_prompts: rule for a prompt that leaves no room for a reply, if `say` gets no `chat`:
            "left", "middle" and "right" cut its last message (see `fit_prompt`), and "wrong" raises
            PromptTooLong.
        constrain: True to sample under the grammar of a chat's constraint.
    """

    engine: Engine
    renderer: Renderer
    slots: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    deadline_s: float | None = None
    max_length: int | None = None
    overlong_prompts: str = "wrong"
    constrain: bool = False

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """Return the next reply; see `PolicyClient`.

        Raises:
            PromptTooLong: the prompt leaves no room for a reply.
            EngineError: the engine fails, or gives the reply up.
            LateCall: there was no reply within the deadline.
        """
        prompt_limit = None
        if self.max_length is not None:
            prompt_limit = self.max_length - sampling.max_tokens
        if chat is None:
            shown, prompt_ids = fit_prompt(
                self.renderer, messages, prompt_limit, self.overlong_prompts
            )
            sampling = replace(sampling, stop=self.renderer.stop)
            completion = await self._sample(prompt_ids, sampling)
            return PolicyReply(
                text=self.renderer.decode(completion.token_ids),
                prompt_ids=tuple(prompt_ids),
                completion=completion,
                shown=None if shown is messages else tuple(shown),
            )

        prompt_ids, is_root = await render_chat(self.renderer, messages, chat)
        if prompt_limit is not None and len(prompt_ids) > prompt_limit:
            raise PromptTooLong(
                f"chat {chat.id}: prompt of {len(prompt_ids)} tokens, "
                f"and there is room for {prompt_limit}"
            )
        sampling = replace(
            sampling,
            stop=self.renderer.stop,
            grammar=self._grammar(prompt_ids, chat),
            candidates=chat.candidates,
        )
        completion = await self._sample_in_chat(prompt_ids, sampling, chat)
        return PolicyReply(
            text=self.renderer.decode(completion.token_ids),
            prompt_ids=tuple(prompt_ids),
            completion=completion,
            raw=self.renderer.decode_raw(completion.token_ids),
            tool_format=self.renderer.tool_format,
            root=is_root,
            grammar=sampling.grammar,
        )

    def _grammar(self, prompt_ids: Sequence[int], chat: ChatState) -> str:
        """Return the grammar of the chat's reply; "" if any reply is allowed, or no grammar can be written."""
        if not self.constrain or chat.constraint is None:
            return ""
        try:
            return self.renderer.grammar(chat.constraint, prompt_ids)
        except GrammarError as error:
            _warn_once(f"a reply is sampled without its grammar, which cannot be written: {error}")
            return ""

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        async with self.slots:
            reply = self.engine.generate(prompt_ids, sampling)
            completion = await with_deadline(self.deadline_s, reply, LateCall)
        _check_complete(completion)
        return completion

    async def _sample_in_chat(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, chat: ChatState
    ) -> Completion:
        """Sample a reply that ends at the first of the chat's `stops`.

        Its last token is the one that completes the stop; tokens after it are cut. An engine that can
        stream reports the text to the chat's `on_text`, and ends the reply soon after the stop. Another
        engine samples to its own end.
        """
        if chat.on_text is None and not chat.stops:
            return await self._sample(prompt_ids, sampling)

        monitor = _ReplyMonitor(self.renderer, prompt_ids, chat)
        engine: Any = self.engine
        async with self.slots:
            if hasattr(engine, "stream"):
                every = _STOP_CHECK_TOKENS if chat.on_text is None else 1
                callback = TokenCallback(monitor.add, every)
                reply = engine.stream(prompt_ids, sampling, callback)
            else:
                reply = engine.generate(prompt_ids, sampling)
            completion: Completion = await with_deadline(self.deadline_s, reply, LateCall)
        completion = monitor.end_at_stop(completion)
        if not monitor.ended_by_chat:
            _check_complete(completion)
        return completion


@cache
def _warn_once(line: str) -> None:
    """Print a line, unless it was printed before."""
    say(line)


def _check_complete(completion: Completion) -> None:
    if completion.finish_reason == "abort":
        raise EngineError(f"the engine gave the reply up after {len(completion.token_ids)} tokens")


class _ReplyMonitor:
    """Monitor of a reply while it is sampled, which reports the text to the chat and finds the chat's stops.

    Attributes:
        ended_by_chat: True once the chat's callback has asked to end the reply.
    """

    def __init__(self, renderer: Renderer, prompt_ids: Sequence[int], chat: ChatState) -> None:
        self._renderer = renderer
        self._prompt_length = len(prompt_ids)
        self._chat = chat
        self._text = ReplyText(renderer, prompt_ids, calls=bool(chat.tools), stops=chat.stops)
        self._token_ids: list[int] = []
        self.ended_by_chat = False

    def add(self, position: int, token_ids: Sequence[int]) -> bool:
        """Take the tokens from `position` on; return False if the reply should end."""
        self._token_ids[position:] = token_ids
        text = self._text.add(position, token_ids)
        if self._chat.on_text is not None:
            self.ended_by_chat = not self._chat.on_text(text, self._renderer.tool_format)
        return not self.ended_by_chat and not self._text.end

    def end_at_stop(self, completion: Completion) -> Completion:
        """Cut a completion behind the token that completes its first stop, if it has one."""
        if not self._chat.stops:
            return completion
        seen = len(self._token_ids)
        if completion.token_ids[:seen] != tuple(self._token_ids):
            seen = 0  # the engine has sampled the reply again from the start
        self._text.add(seen, completion.token_ids[seen:])
        if not self._text.end:
            return completion
        return completion.stopped_after(self._text.end, self._prompt_length)


async def count_prompt_tokens(
    policy: PolicyClient, messages: Sequence[Message], chat: ChatState
) -> int:
    """Return the number of tokens of a chat's next prompt.

    Raises:
        EngineError: the model is behind an API, so its tokenizer is not known here.
    """
    if not isinstance(policy, EngineClient):
        raise EngineError("its model is behind an API, so its tokenizer is not known here")
    prompt_ids, _ = await render_chat(policy.renderer, messages, chat)
    return len(prompt_ids)
