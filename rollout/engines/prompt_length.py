"""Limits on the length of prompts and requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout.base.errors import PromptTooLong
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Message, Sampling


def _keep_end(token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    return token_ids[len(token_ids) - count :]


def _keep_both_ends(token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    start = count // 2
    return token_ids[:start] + token_ids[len(token_ids) - (count - start) :]


def _keep_start(token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    return token_ids[:count]


# Functions that cut token ids to a count. Each is named after the side that is cut, as in verl's
# `data.truncation`.
TRUNCATIONS: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "left": _keep_end,
    "middle": _keep_both_ends,
    "right": _keep_start,
}


def fit_prompt(
    renderer: Renderer, messages: Sequence[Message], limit: int | None, rule: str
) -> tuple[Sequence[Message], tuple[int, ...]]:
    """Render a chat, and cut its last message if the prompt is longer than `limit`.

    Args:
        limit: maximum number of tokens of the prompt; None for no limit.
        rule: side of the message that is cut, a key of `TRUNCATIONS`. With any other value, a prompt
            that is too long is refused.

    Returns:
        The messages, and their token ids [P].

    Raises:
        PromptTooLong: the prompt is too long and may not be cut, or is too long even without its
            last message.
    """
    token_ids = renderer.render(messages)
    if limit is None or len(token_ids) <= limit:
        return messages, token_ids

    size = len(token_ids)
    if rule in TRUNCATIONS:
        *earlier, last = messages
        last_ids = renderer.encode(last.content)
        retained = len(last_ids) - (size - limit)
        while retained > 0:
            shortened = renderer.decode(TRUNCATIONS[rule](last_ids, retained))
            cut_messages = (*earlier, replace(last, content=shortened))
            token_ids = renderer.render(cut_messages)
            if len(token_ids) <= limit:
                return cut_messages, token_ids
            # The text is tokenized differently where it was cut, so a few more tokens must go.
            retained -= len(token_ids) - limit
    raise PromptTooLong(f"prompt of {size} tokens, and there is room for {limit}")


def request_error(
    prompt_ids: Sequence[int], sampling: Sampling, *, vocab_size: int, max_length: int
) -> str:
    """Validate a request to an engine; return the first problem, or ""."""
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
            f"prompt of {size} tokens and max_tokens {sampling.max_tokens} exceed the engine's "
            f"max_length {max_length}; shorten the prompt or raise max_length"
        )
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}; expected 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return (
            f"top_p is {sampling.top_p} and top_k {sampling.top_k}; "
            "expected 0 < top_p <= 1 and top_k >= 0"
        )
    return ""
