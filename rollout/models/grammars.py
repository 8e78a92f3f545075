"""Grammars of constrained replies, and the tokens of a vocabulary that each position allows.

A `ReplyConstraint` says which form a reply must have, `reply_grammar` writes it as a Lark grammar of
llguidance, and `Grammars` computes the sampling masks of a grammar for one model. An engine masks
the logits of its samples with them, and a trainer computes the same masks again from the grammar
and the sampled tokens. llguidance is imported where it is used, because most runs need no grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollout.models.architecture import read_architecture
from rollout.models.safe_tokenizer import SafeTokenizer
from rollout.models.tool_calls import ToolFormat, ToolSchema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Thoughts of a reply: none, already begun by the prompt, or as the model likes.
Thoughts = Literal["none", "open", "optional"]

_CACHED_GRAMMARS = 64  # compiled grammars of a model
# White space as in json.dumps. With free white space a model could write it without end. Keywords
# of a schema that llguidance does not know are not enforced.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
_ANY_TEXT = r"/(.|\n)*/"
_THOUGHT_START = "<think>"
_THOUGHT_END = "</think>"

# Text before the name of a call, between its name and its arguments, and behind these; and the text
# between two calls.
_CALL_TEXTS: Mapping[ToolFormat, tuple[str, str, str, str]] = {
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    "llama3": ('{"name": ', ', "parameters": ', "}", "; "),
    "fenced": ('```tool\n{"name": ', ', "arguments": ', "}\n```", "\n"),
}


class GrammarError(ValueError):
    """Error of a grammar that cannot be compiled, or that does not allow the tokens of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyConstraint:
    """Form of a reply: JSON of a schema, or calls of tools; either will do if both are given.

    Attributes:
        schema: JSON schema as text; "" allows no JSON.
        tools: tools that may be called, with their JSON schemas as text; () allows no calls.
        parallel_calls: True if the reply may make several calls.
    """

    schema: str = ""
    tools: tuple[tuple[str, str], ...] = ()
    parallel_calls: bool = True

    @classmethod
    def of(
        cls,
        schema: Mapping[str, Any] | None,
        tools: Sequence[ToolSchema],
        *,
        parallel_calls: bool = True,
    ) -> ReplyConstraint:
        """Return the constraint of a schema and of tools; None stands for no schema."""
        return cls(
            schema="" if schema is None else json.dumps(schema),
            tools=tuple((tool.name, json.dumps(tool.parameters)) for tool in tools),
            parallel_calls=parallel_calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """Marks of a model's replies.

    Attributes:
        tool_format: format of tool calls.
        ends: ids of the tokens that end a reply.
        thoughts: thoughts before the reply.
        special_tokens: ids of the special tokens by their text.
    """

    tool_format: ToolFormat
    ends: tuple[int, ...]
    thoughts: Thoughts = "none"
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def literal(self, text: str) -> str:
        """Return the grammar of a fixed text; a special token in it is that token."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        parts = []
        for part in re.split(f"({pattern})", text):
            if part in self.special_tokens:
                parts.append(_token(self.special_tokens[part]))
            elif part:
                parts.append(json.dumps(part, ensure_ascii=False))
        return " ".join(parts)


def _token(number: int) -> str:
    return f"<[{number}]>"


def reply_grammar(constraint: ReplyConstraint, syntax: ReplySyntax) -> str:
    """Return the Lark grammar of a constrained reply, including the token that ends it.

    Raises:
        GrammarError: llguidance cannot express the schema of the reply or of a tool.
    """
    from llguidance import LLMatcher

    rules = []
    alternatives = []
    if constraint.schema:
        alternatives.append("json")
        rules.append(f"json: {_json(json.loads(constraint.schema))}")
    if constraint.tools:
        alternatives.append("calls")
        rules += _call_rules(constraint, syntax)
    thoughts = ""
    if syntax.thoughts != "none":
        thoughts = "thoughts "
        rules += _thought_rules(syntax)

    ends = " | ".join(map(_token, syntax.ends))
    # SGLang takes a text with this first line for Lark, and other texts for another kind of grammar.
    lines = ["%llguidance {}", f"start: {thoughts}({' | '.join(alternatives)}) ({ends})", *rules]
    grammar = "\n".join(lines) + "\n"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise GrammarError(messages[0])
    return grammar


def _json(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that follows a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _call_rules(constraint: ReplyConstraint, syntax: ReplySyntax) -> list[str]:
    """Return the rules of calls; the schema of each tool is the root of its own references."""
    before_name, before_arguments, after, between = _CALL_TEXTS[syntax.tool_format]
    repetition = f" ({syntax.literal(between)} call)*" if constraint.parallel_calls else ""
    names = [f"call_{number}" for number in range(len(constraint.tools))]
    rules = [f"calls: call{repetition}", f"call: {' | '.join(names)}"]
    for rule, (name, parameters) in zip(names, constraint.tools, strict=True):
        quoted_name = json.dumps(name, ensure_ascii=False)
        start = syntax.literal(f"{before_name}{quoted_name}{before_arguments}")
        arguments = _json({"type": "object", **json.loads(parameters)})
        rules.append(f"{rule}: {start} {arguments} {syntax.literal(after)}")
    return rules


def _thought_rules(syntax: ReplySyntax) -> list[str]:
    """Return the rules of thoughts, which end at their mark and up to two line breaks."""
    if _THOUGHT_END in syntax.special_tokens:
        rest = f"thought_rest: {_ANY_TEXT} {syntax.literal(_THOUGHT_END)}"
    else:
        rest = f"thought_rest[suffix={json.dumps(_THOUGHT_END)}]: {_ANY_TEXT}"
    whole = r"thought_rest /\n{0,2}/"
    if syntax.thoughts == "optional":
        whole = f"({syntax.literal(_THOUGHT_START)} {whole})?"
    return [f"thoughts: {whole}", rest]


class Grammars:
    """Grammars over the vocabulary of one model.

    A mask is uint8 [⌈V / 32⌉ · 4]: the bit `i % 8` of byte `i // 8` is 1 if token i is allowed.
    """

    def __init__(self, folder: Path | str) -> None:
        """Remember the model folder; its tokenizer is read with the first grammar."""
        self._folder = folder
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer = SafeTokenizer(self._folder).tokenizer
        return LLTokenizer(
            tokenizer.backend_tokenizer.to_str(),
            n_vocab=read_architecture(self._folder).vocab,
            eos_token=tokenizer.eos_token_id,
        )

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of a reply.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        return self._compiled(grammar).deep_copy()

    def masks(self, grammar: str, token_ids: Sequence[int]) -> list[np.ndarray]:
        """Return the mask at each token of a reply.

        Raises:
            GrammarError: the grammar cannot be compiled, or does not allow one of the tokens.
        """
        matcher = self.matcher(grammar)
        masks = []
        for position, token in enumerate(token_ids):
            masks.append(next_mask(matcher))
            if not matcher.consume_token(token):
                raise GrammarError(
                    f"token {position} of the reply, {token}, is not one that its grammar allows"
                )
        return masks


def next_mask(matcher: LLMatcher) -> np.ndarray:
    """Return the mask of the next token; see `Grammars`.

    It allows no token if the matcher has an error, as when a grammar exceeds llguidance's limits.
    """
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.zeros_like(mask) if matcher.is_error() else mask


def unpack_masks(masks: np.ndarray, vocab: int) -> np.ndarray:
    """Convert masks [N, bytes] to bool [N, V], True for tokens that are allowed."""
    return np.unpackbits(masks, axis=1, count=vocab, bitorder="little").astype(bool)
