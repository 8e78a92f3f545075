"""Tokenizer that encodes special tokens in the text of a message as ordinary text."""

import re
import threading
from collections.abc import Collection
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from retrieval.regular_files import check_regular
from rollout.base.errors import ModelError
from rollout.models.tool_calls import PYTHON_TAG

_TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "chat_template.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)


class SafeTokenizer:
    """Tokenizer whose special tokens come from the chat template alone.

    Text of messages and of tools is passed to `protect` before it enters the template. If the text
    spells a special token, `protect` marks the spelling, and `encode` tokenizes marked spellings as
    ordinary text. Therefore no user, tool or model can end a message and begin another in somebody
    else's role. The one special token that a sampled reply may spell is the mark of a tool call
    (PYTHON_TAG).

    Attributes:
        tokenizer: the Hugging Face tokenizer.
        special_tokens: ids of all special tokens by their text.
        special_ids: ids of all special tokens.
        special_pattern: matches the text of any special token.
    """

    def __init__(self, model: Path | str) -> None:
        """Load the tokenizer of folder `model`; only files on this machine are read.

        Raises:
            ModelError: the folder has no tokenizer that can be loaded.
        """
        # AutoTokenizer would replace the pre-tokenizer of a Qwen2 model's tokenizer.json by another.
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

        try:
            for pattern in _TOKENIZER_FILES:
                for file in Path(model).glob(pattern):
                    check_regular(file)  # the library would wait for ever for a pipe
            self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
                str(model), local_files_only=True
            )
        except Exception as error:  # the library raises many types for the files of strangers
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(
                f"{model}: the tokenizer cannot be loaded ({reason}); expected a Hugging Face folder "
                "with its tokenizer.json"
            ) from error
        self.special_tokens = {
            token.content: number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.special_ids = frozenset(self.special_tokens.values())
        special_texts = set(self.special_tokens)
        self.special_pattern = _match_any(special_texts)
        self._pattern_of_replies = _match_any(special_texts - {PYTHON_TAG})

        self._mark = mark_control_tokens
        self._encode_marked = encode_marked_chat
        # The library wraps what it marks in two characters, which it does not name.
        marks = set(mark_control_tokens("|", re.compile(r"\|"))) - {"|"}
        self._mark_pattern = _match_any(marks)
        self._literal_lock = threading.Lock()

    def protect(self, value: Any, *, is_reply: bool = False) -> Any:
        """Mark the special tokens in a text, or in all texts of a list or a dictionary.

        Args:
            value: text, list or dictionary to mark.
            is_reply: the text is a sampled reply, which may call a tool with a special token.
        """
        pattern = self._pattern_of_replies if is_reply else self.special_pattern
        return self._mark(value, pattern)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids [T] of a text; spellings that `protect` marked are ordinary text."""
        if not self._mark_pattern.search(text):
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        # To encode special tokens as text, the library switches a setting of the tokenizer on and
        # off, which other threads must not see.
        with self._literal_lock:
            return tuple(self._encode_marked(self._literal_tokenizer, text))

    @cached_property
    def _literal_tokenizer(self) -> Any:
        """Copy of the tokenizer for encoding special tokens as text."""
        return deepcopy(self.tokenizer)


def _match_any(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of the longest of these texts; without texts, it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
