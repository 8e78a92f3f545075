"""Chat template: messages to prompt tokens and back, by a model folder's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from rollout.records.trajectory import Message


class Renderer:
    """The tokenizer and chat template of one Hugging Face model folder."""

    def __init__(self, model: Path | str) -> None:
        """Load from folder `model`; only files on this machine are read."""
        # not AutoTokenizer: for a Qwen2 model it puts Qwen2's own pre-tokeniser in place of the one in tokenizer.json
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a reply."""
        return (self._tokenizer.eos_token_id,)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids [P] of a conversation, up to where the assistant's reply begins."""
        return self._encode(self._text(messages))

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Token ids [C] of a reply as a model would write it, the stop token included."""
        return (*self._encode(text), *self.stop)

    def dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Token ids [T] of a whole conversation, and which of them [T] the assistant wrote.

        Every reply is tokenised by itself, as it would have been sampled.

        Raises:
            ValueError: the chat template rewrites earlier messages as the conversation goes on.
        """
        ids: list[int] = []
        written: list[bool] = []
        text = ""
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._text(messages[:i])
            if not prompt.startswith(text):
                raise ValueError("the chat template rewrites earlier messages; its dialogues cannot be trained on")
            head, reply = self._encode(prompt[len(text) :]), self.encode_reply(message.content)
            ids += head + reply
            written += [False] * len(head) + [True] * len(reply)
            text = prompt + message.content + self._tokenizer.eos_token
        return tuple(ids), tuple(written)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of completion tokens without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _text(self, messages: Sequence[Message]) -> str:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
