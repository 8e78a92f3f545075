"""Rendering of chats to token ids; long chats are rendered in a background thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rollout.engines.policy_client import ChatState
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Message

_LONG_CHAT_CHARS = 4_000  # the thread renders chats with more characters of messages and tools
_TOOL_CHARS = 500  # estimate for a tool's schema, which is not rendered yet

# One thread is enough to keep the event loop responsive, and a second one would compete with it.
_thread = ThreadPoolExecutor(1, "rendering")


async def render_chat(
    renderer: Renderer, messages: Sequence[Message], chat: ChatState
) -> tuple[tuple[int, ...], bool]:
    """Render a chat's next prompt.

    Returns:
        The token ids [P], and True if they do not continue the chat's latest turn.
    """
    render = partial(renderer.next_prompt, chat.before, messages, chat.tools)
    size = sum(message.size for message in messages) + _TOOL_CHARS * len(chat.tools)
    if size <= _LONG_CHAT_CHARS:
        return render()
    return await asyncio.get_running_loop().run_in_executor(_thread, render)
