"""Chat template: messages to prompt tokens and back, by a model folder's own tokenizer; chats go on token by token."""

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from rollout.base.errors import ModelError
from rollout.base.json_files import read_json
from rollout.base.yaml_files import read_yaml
from rollout.models.tool_calls import (
    PYTHON_TAG,
    TOOL_FORMATS,
    ToolSchema,
    in_words,
    thought_and_text,
    tool_format_of,
)
from rollout.records.trajectory import Message, Turn

CHAT_TEMPLATES: Mapping[str, str] = read_yaml(Path(__file__).with_name("chat_templates.yaml"))
_TURN_ENDS = {
    "chatml": "<|im_end|>"
}  # by template, what ends a reply where it is not the tokenizer's own end

# What is left of [T] tokens when `most` may stay. A name is the side that goes, as in verl's `data.truncation`.
CUTS: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "left": lambda tokens, most: tokens[len(tokens) - most :],
    "middle": lambda tokens, most: tokens[: most // 2] + tokens[len(tokens) - (most - most // 2) :],
    "right": lambda tokens, most: tokens[:most],
}

_RECENT = 64  # first prompts whose text and tokens are kept: those of a group are the same
_MARKS = (
    "\ue001",
    "\ue002",
)  # stand for a reply's thoughts and its words; no template changes them


def has_chat_template(model: Path | str) -> bool:
    """Whether a model folder brings one, by its files alone."""
    path = Path(model) / "tokenizer_config.json"
    try:
        told = read_json(path) if path.is_file() else {}
    except ValueError:
        return False
    return bool(told.get("chat_template")) or any(Path(model).glob("chat_template.*"))


class Renderer:
    """The tokenizer and chat template of one Hugging Face model folder.

    Special tokens come from the template alone: where a message or a tool's description spells one, it is tokenised as
    any other text, so that nobody can end a message and begin another in a role that is not theirs.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Load from folder `model`; only files on this machine are read.

        Args:
            template: name in CHAT_TEMPLATES; None: the folder's own.
            arguments: what the template is given besides the messages, such as Qwen3's `enable_thinking`.

        Raises:
            ModelError: the folder has no chat template or names no end of a reply, its tokenizer has no token for the
                template's, or its template does not read an argument.
        """
        # not AutoTokenizer: for a Qwen2 model it puts Qwen2's own pre-tokeniser in place of the one in tokenizer.json
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

        self._mark, self._encode_marked = mark_control_tokens, encode_marked_chat
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
        if template is not None:
            self._tokenizer.chat_template = CHAT_TEMPLATES[template]
        self._arguments = dict(arguments or {})
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{model}: a base model without a chat template; "
                f"set chat_template to one of {', '.join(CHAT_TEMPLATES)}, or take the instruct model"
            )
        for name in self._arguments:
            if not re.search(rf"\b{re.escape(name)}\b", self._tokenizer.get_chat_template()):
                raise ModelError(
                    f"{model}: its chat template reads no '{name}'; take it out of chat_template_kwargs"
                )
        self.tool_format = tool_format_of(self._tokenizer.get_chat_template())
        specials = {
            number: t.content
            for number, t in self._tokenizer.added_tokens_decoder.items()
            if t.special
        }
        self._special_ids, special = frozenset(specials), set(specials.values())
        self._special = _any_of(special)
        self._special_but_own = _any_of(
            special - {PYTHON_TAG}
        )  # a sampled reply calls its tools by that token
        self._marks = _any_of(set(mark_control_tokens("|", _any_of("|"))) - {"|"})
        self._spelling = threading.Lock()
        self._begin = lru_cache(_RECENT)(self._encode)
        self._plain = lru_cache(_RECENT)(self._rendered)
        self._dated = (
            "strftime_now" in self._tokenizer.get_chat_template()
        )  # it may say something else tomorrow
        self.stop = _ends(
            model, self._turn_end(model, template), self._tokenizer.eos_token_id
        )  # end a reply
        self._end_texts = [str(self._tokenizer.convert_ids_to_tokens(end)) for end in self.stop]

    def _turn_end(self, model: Path | str, template: str | None) -> int | None:
        """The token that the template writes behind a reply, which a base model's tokenizer may not have as its end."""
        end = _TURN_ENDS.get(template or "")
        if end is None:
            asked, said = (
                Message(role="user", content="?"),
                Message(role="assistant", content=_MARKS[1]),
            )
            try:
                rests = [
                    self._text(chat).rpartition(_MARKS[1])[2]
                    for chat in ((asked, said), (asked, said, asked))
                ]
            except TemplateError:  # of one that takes no such chat
                return None
            behind, again = ((self._special.match(rest) or ("",))[0] for rest in rests)
            # what begins the next message is no end
            return (
                int(self._tokenizer.convert_tokens_to_ids(behind))
                if behind and behind == again
                else None
            )
        found: int | None = self._tokenizer.get_vocab().get(end)
        if found is None:
            raise ModelError(
                f"{model}: its tokenizer has no {end}, which ends a turn of chat_template {template}; set it to plain"
            )
        return found

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Token ids [P] of a conversation, up to where the assistant's reply begins."""
        return self._begin(self._text(messages, tools))

    def extend(
        self, before: Turn, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...] | None:
        """Token ids [P] of a conversation that goes on after the turn `before`: token in, token out.

        They are the turn's prompt and completion as they are, and the new text behind them. The text is found by
        rendering the conversation with marks in place of the reply: the sampled ids stand for the reply, however the
        template would write its words and spaces.

        Args:
            tools: the chat's, the same in every turn.

        Returns:
            None where the ids cannot go on: the messages before the reply, or the template's text of them, have
            changed, or the template leaves out thoughts of the reply or puts something to it.
        """
        read = len(before.messages)
        if (
            tuple(messages[:read]) != before.messages
            or len(messages) == read
            or messages[read].role != "assistant"
        ):
            return None
        thought, ended, _ = messages[read].text.lstrip().rpartition("</think>")
        own = thought.removeprefix("<think>")
        begin = "" if own == thought else "<think>\n"
        stub = (
            f"{begin}{_MARKS[0] if own.strip() else ''}\n</think>\n\n{_MARKS[1]}"
            if ended
            else _MARKS[1]
        )
        head = self._text(before.messages, tools)
        marked = self._text(
            (*messages[:read], Message(role="assistant", content=stub), *messages[read + 1 :]),
            tools,
        )
        reply, found, rest = marked[len(head) :].partition(_MARKS[1])
        if not marked.startswith(head) or (reply + found).split() != stub.split():
            return None
        if before.completion_ids[-1:] and before.completion_ids[-1] in self.stop:
            rest = next(
                (rest.removeprefix(end) for end in self._end_texts if rest.startswith(end)), rest
            )
        return before.prompt_ids + before.completion_ids + self._encode(rest)

    def go_on(
        self, before: Turn | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[tuple[int, ...], bool]:
        """Token ids [P] of a chat after its latest turn, if there is one, and whether they begin anew after it."""
        goes_on = None if before is None else self.extend(before, messages, tools)
        ids = self.render(messages, tools) if goes_on is None else goes_on
        return ids, goes_on is None and before is not None

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Token ids [C] of a reply as a model would write it, its end included."""
        return (*self.encode(text), self.stop[0])

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
                raise ValueError(
                    "the chat template rewrites earlier messages; its dialogues cannot be trained on"
                )
            head, reply = self._encode(prompt[len(text) :]), self.encode_reply(message.content)
            ids += head + reply
            written += [False] * len(head) + [True] * len(reply)
            text = prompt + self._mark(message.content, self._special) + self._end_texts[0]
        return tuple(ids), tuple(written)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of completion tokens without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """The text of completion tokens with special tokens, without the end of the reply."""
        own = token_ids[:-1] if token_ids and token_ids[-1] in self.stop else token_ids
        return str(self._tokenizer.decode(list(own), skip_special_tokens=False))

    def word(self, stream: DecodeStream, token: int) -> str | None:
        """The text that a reply's next token completes, "" for its end and where there is none; None: it is special."""
        if token in self.stop:
            return ""
        return (
            None
            if token in self._special_ids
            else stream.step(self._tokenizer.backend_tokenizer, token) or ""
        )

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        return (
            self._rendered(messages, tools)
            if tools or self._dated
            else self._plain(tuple(messages))
        )

    def _rendered(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        if self.tool_format == "fenced":
            messages, tools = in_words(messages, tools), ()
        return str(
            self._tokenizer.apply_chat_template(
                [
                    self._mark(
                        _as_template_takes(message),
                        self._special_but_own if message.raw else self._special,
                    )
                    for message in messages
                ],
                tools=self._mark([tool.function for tool in tools], self._special) or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._arguments,
            )
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids [T] of a text by itself, none of them special."""
        return self._encode(self._mark(text, self._special))

    def _encode(self, marked: str) -> tuple[int, ...]:
        """Token ids [T] of text with marks around what spells a special token and is none."""
        if not self._marks.search(marked):
            return tuple(self._tokenizer.encode(marked, add_special_tokens=False))
        with self._spelling:  # the library turns a switch of the tokenizer on and off
            return tuple(self._encode_marked(self._speller, marked))

    @cached_property
    def _speller(self) -> Any:
        return deepcopy(self._tokenizer)


class WordStream:
    """The text of a reply as its tokens come; a thought that the prompt has begun begins with its mark.

    Attributes:
        end: tokens up to the first with which the text, outside of thoughts and calls, has a stop; 0: it has none.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompt_ids: Sequence[int],
        *,
        calls: bool,
        stops: Collection[str] = (),
    ) -> None:
        """`calls`: whether special tokens of the reply may be of a call of tools; what follows one is then not told."""
        self._renderer, self._calls, self._stops = renderer, calls, stops
        self._reach = max(map(len, stops), default=0) + len(
            "<think"
        )  # so many characters may prove to be no thought
        self._thinks = renderer.decode_raw(prompt_ids[-8:]).rstrip().endswith("<think>")

    def add(self, place: int, ids: Sequence[int]) -> str:
        """The text so far with the token `ids` from `place` on, which is 0 where an engine begins again.

        Tokens behind the `end` are left out.
        """
        if not place:
            self._stream, self._held, self.end = DecodeStream(skip_special_tokens=True), False, 0
            self._text = "<think>" if self._thinks else ""
        for size, token in enumerate(ids, place + 1):
            if self.end:
                break
            word = self._renderer.word(self._stream, token)
            self._held |= word is None and self._calls
            if word and not self._held:
                self._text += word
                self.end = size if self._stopped(len(word)) else 0
        return self._text

    def _stopped(self, new: int) -> bool:
        """Whether the text has a stop, which its `new` last characters would have completed."""
        tail = self._text[-(new + self._reach) :]
        if not any(stop in tail for stop in self._stops):
            return False
        _, text = thought_and_text(self._text)
        if self._calls:
            text = TOOL_FORMATS[self._renderer.tool_format](text)[0].lstrip()
        return any(stop in text for stop in self._stops)


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest that it can, and nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _as_template_takes(message: Message) -> dict[str, Any]:
    """A message as chat templates take it; of a sampled reply its own words, and not what was read out of them."""
    if message.raw:
        return {"role": message.role, "content": message.raw}
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": c.id,
                "function": {"name": c.name, "arguments": json.loads(c.arguments)},
            }
            for c in message.calls
        ]
    return fields | ({"tool_call_id": message.answers} if message.answers else {})


def _ends(model: Path | str, *own: int | None) -> tuple[int, ...]:
    """The ids that end a reply, the template's and the tokenizer's `own` first; a model without any is refused."""
    path = Path(model) / "generation_config.json"
    try:
        named = read_json(path).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: not readable ({error}); expected a JSON object") from error
    further = named if isinstance(named, list) else [named]
    ends = tuple(dict.fromkeys(end for end in (*own, *further) if end is not None))
    if not ends:
        raise ModelError(f"{model}: nothing ends a reply; name eos_token in tokenizer_config.json")
    return ends
