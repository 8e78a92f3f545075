"""Chat template of a model folder: convert chats to token ids, and token ids of replies to text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from retrieval.regular_files import read_regular_text
from rollout.base.errors import ModelError
from rollout.base.json_files import read_json
from rollout.base.yaml_files import read_yaml
from rollout.models.grammars import ReplyConstraint, ReplySyntax, Thoughts, reply_grammar
from rollout.models.safe_tokenizer import SafeTokenizer
from rollout.models.template_trial import template_problem
from rollout.models.tool_calls import ToolSchema, detect_tool_format, write_tools_as_text
from rollout.records.trajectory import Message, Turn

CHAT_TEMPLATES: Mapping[str, str] = read_yaml(Path(__file__).with_name("chat_templates.yaml"))

# Token that ends a turn in a template of CHAT_TEMPLATES; other templates are searched for it.
_TURN_ENDS = {"chatml": "<|im_end|>"}

_ADVICE = f"set chat_template to one of {', '.join(CHAT_TEMPLATES)}, or take another model"

# Number of chats without tools whose texts are cached, and of texts whose tokens are cached:
# trajectories of a group begin with the same prompt.
_CACHED_PROMPTS = 64

# Grammars of replies that are cached: trajectories of a group call with the same schemas.
_CACHED_GRAMMARS = 64

_LAST_PROMPT_TOKENS = 16  # tokens of a prompt that can contain a mark of thoughts at its end

# Stand-ins for the thoughts and the text of a reply: characters that no template changes.
_THOUGHTS_MARK = "\ue001"
_TEXT_MARK = "\ue002"


def has_chat_template(model: Path | str) -> bool:
    """Return True if a model folder has a chat template; only its files are read."""
    path = Path(model) / "tokenizer_config.json"
    try:
        config = read_json(path) if path.is_file() else {}
    except (OSError, ValueError):
        return False
    has_template = isinstance(config, dict) and bool(config.get("chat_template"))
    return has_template or any(Path(model).glob("chat_template.*"))


def chat_template_problem(model: Path | str) -> str:
    """Return why the chat template of a model folder cannot be used, or "".

    Only the folder's files are read. A folder without a template has no problem.
    """
    try:
        texts = list(_template_texts(Path(model)))
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error}); {_ADVICE}"
    for text in texts:
        problem = template_problem(text)
        if problem:
            return f"{problem}; {_ADVICE}"
    return ""


def _template_texts(model: Path) -> Iterator[str]:
    """Yield the texts of all chat templates in a model folder."""
    file = model / "chat_template.jinja"
    if file.exists():
        yield read_regular_text(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = read_json(model / name) if (model / name).exists() else {}
        templates = config.get("chat_template") if isinstance(config, dict) else None
        # Some folders have several templates, each an object with a name.
        if not isinstance(templates, list):
            templates = [templates]
        for template in templates:
            text = template.get("template") if isinstance(template, dict) else template
            if isinstance(text, str):
                yield text


class Renderer:
    """Tokenizer and chat template of one Hugging Face model folder.

    Special tokens that the text of a message or of a tool spells are tokenized as ordinary text, see
    `SafeTokenizer`.

    Attributes:
        tool_format: format of the tool calls that the template teaches the model.
        stop: ids of the tokens that end a reply; replies are written with the first.
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
            model: folder of the model.
            template: key of CHAT_TEMPLATES; None for the folder's template.
            arguments: variables for the template, such as Qwen3's `enable_thinking`.

        Raises:
            ModelError: the folder has no chat template or no token that ends a reply, the tokenizer
                cannot be loaded or lacks the token that ends a turn, or the template cannot be used
                or does not use an argument.
        """
        self._safe = SafeTokenizer(model)
        self._tokenizer = self._safe.tokenizer
        if template is not None:
            self._tokenizer.chat_template = CHAT_TEMPLATES[template]
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{model}: a base model without a chat template; set chat_template to one of "
                f"{', '.join(CHAT_TEMPLATES)}, or take the instruct model"
            )

        template_text = self._tokenizer.get_chat_template()
        if template is None:
            problem = template_problem(template_text)
            if problem:
                raise ModelError(f"{model}: the chat template cannot be used: {problem}; {_ADVICE}")
        self._arguments = dict(arguments or {})
        for name in self._arguments:
            if not re.search(rf"\b{re.escape(name)}\b", template_text):
                raise ModelError(
                    f"{model}: the chat template does not use '{name}'; remove it from "
                    "chat_template_kwargs"
                )

        self.tool_format = detect_tool_format(template_text)
        # The text of such a template changes with the time, and cannot be cached.
        self._depends_on_time = "strftime_now" in template_text
        self._cached_text = lru_cache(_CACHED_PROMPTS)(self._apply_template)
        self._cached_encode = lru_cache(_CACHED_PROMPTS)(self._safe.encode)
        self._cached_grammar = lru_cache(_CACHED_GRAMMARS)(self._write_grammar)
        self._mentions_thoughts = "</think>" in template_text

        turn_end = self._turn_end(model, template)
        self.stop = _reply_ends(model, turn_end, self._tokenizer.eos_token_id)
        self._stop_texts = [str(self._tokenizer.convert_ids_to_tokens(end)) for end in self.stop]

    def _turn_end(self, model: Path | str, template: str | None) -> int | None:
        """Return the token that the template writes after a reply, or None if it writes none.

        The tokenizer of a base model may name another token as its end of text.

        Raises:
            ModelError: the tokenizer lacks the token.
        """
        token = _TURN_ENDS.get(template or "")
        if token is None:
            token = self._find_turn_end()
            return None if token is None else int(self._tokenizer.convert_tokens_to_ids(token))

        token_id: int | None = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise ModelError(
                f"{model}: the tokenizer has no {token}, which ends a turn of chat_template "
                f"{template}; set chat_template to plain"
            )
        return token_id

    def _find_turn_end(self) -> str | None:
        """Return the special token that follows a reply in the template's text, if there is one."""
        question = Message(role="user", content="?")
        reply = Message(role="assistant", content=_TEXT_MARK)
        tokens = []
        for chat in ((question, reply), (question, reply, question)):
            try:
                text = self._text(chat)
            except TemplateError:
                return None  # the template takes no such chat
            _, _, rest = text.rpartition(_TEXT_MARK)
            token = self._safe.special_pattern.match(rest)
            tokens.append("" if token is None else token.group())

        # If the tokens differ, they begin the next message, and do not end the reply.
        last_turn_end, turn_end = tokens
        return turn_end if turn_end and turn_end == last_turn_end else None

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Return the token ids [P] of a chat, up to where the assistant's next reply begins."""
        return self._cached_encode(self._text(messages, tools))

    def extend(
        self, before: Turn, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...] | None:
        """Return the token ids [P] of a chat that extend a turn's tokens, or None if that is impossible.

        The ids begin with the turn's prompt and completion as they were sampled, whatever words and
        spaces the template would write for the reply. Only the text after the reply is
        tokenized. This text is found by rendering the chat with a stand-in for the reply.

        Extending is impossible if the earlier messages or their rendering have changed, or if the template
        drops the reply's thoughts or adds text to the reply.

        Args:
            before: the turn.
            messages: all messages: the turn's, the turn's reply, and the new ones.
            tools: tools of the chat, the same in every turn.
        """
        turn_length = len(before.messages)
        is_continued = (
            len(messages) > turn_length
            and tuple(messages[:turn_length]) == before.messages
            and messages[turn_length].role == "assistant"
        )
        if not is_continued:
            return None

        placeholder = _placeholder(messages[turn_length].text)
        reply = Message(role="assistant", content=placeholder)
        earlier_text = self._text(before.messages, tools)
        text = self._text(
            (*messages[:turn_length], reply, *messages[turn_length + 1 :]),
            tools,
        )
        if not text.startswith(earlier_text):
            return None
        reply_text, mark, rest = text[len(earlier_text) :].partition(_TEXT_MARK)
        if (reply_text + mark).split() != placeholder.split():
            return None

        if before.completion_ids and before.completion_ids[-1] in self.stop:
            rest = self._remove_stop(rest)
        return before.prompt_ids + before.completion_ids + self._safe.encode(rest)

    def prepend_context(self, context: str, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a system message, followed by those of a prompt.

        The ids of the prompt are not changed, except that its start token is dropped if the system
        message begins with one.

        Args:
            context: text of the system message.
            prompt_ids: token ids of the prompt [P], which may have a system message of its own.

        Raises:
            ModelError: the template writes no system message without other messages.
        """
        message = Message(role="system", content=context)
        try:
            text = self._apply_template([message], opens_reply=False)
        except TemplateError as error:
            raise ModelError(
                f"the chat template does not write a system message alone: {error}"
            ) from None
        context_ids = self._cached_encode(text)
        start = self._tokenizer.bos_token_id
        if start is not None and context_ids[:1] == tuple(prompt_ids[:1]) == (start,):
            prompt_ids = prompt_ids[1:]
        return (*context_ids, *prompt_ids)

    def _remove_stop(self, text: str) -> str:
        """Remove a stop token's text from the start of a text."""
        for stop_text in self._stop_texts:
            if text.startswith(stop_text):
                return text.removeprefix(stop_text)
        return text

    def next_prompt(
        self, before: Turn | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[tuple[int, ...], bool]:
        """Return the token ids [P] of a chat's next prompt, extending the latest turn if possible.

        Args:
            before: latest turn of the chat; None before its first reply.
            messages: all messages of the chat.
            tools: tools of the chat.

        Returns:
            The token ids, and True if the chat was rendered anew although it has a latest turn.
        """
        if before is None:
            return self.render(messages, tools), False
        token_ids = self.extend(before, messages, tools)
        if token_ids is None:
            return self.render(messages, tools), True
        return token_ids, False

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens."""
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids [T] of a text, without special tokens."""
        return self._safe.encode(self._safe.protect(text))

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Return the token ids [C] of a reply as a model would write it, with its end."""
        return (*self.encode(text), self.stop[0])

    def tokenize_dialogue(
        self, messages: Sequence[Message]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the token ids [T] of a dialogue and a mask [T], True for the assistant's tokens.

        Every reply is tokenized without the text around it, as it would have been sampled.

        Raises:
            ValueError: the chat template rewrites earlier messages as the dialogue continues.
        """
        token_ids: list[int] = []
        is_reply: list[bool] = []
        text = ""
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._text(messages[:index])
            if not prompt.startswith(text):
                raise ValueError(
                    "the chat template rewrites earlier messages, so its dialogues cannot be "
                    "trained on"
                )
            new_ids = self._safe.encode(prompt[len(text) :])
            reply_ids = self.encode_reply(message.content)
            token_ids += new_ids + reply_ids
            is_reply += [False] * len(new_ids) + [True] * len(reply_ids)
            text = prompt + self._safe.protect(message.content) + self._stop_texts[0]
        return tuple(token_ids), tuple(is_reply)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply's tokens without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply's tokens with special tokens, but without the reply's end."""
        if token_ids and token_ids[-1] in self.stop:
            token_ids = token_ids[:-1]
        return self.decode_prompt(token_ids)

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's tokens with all special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, in which it may open or close a thought."""
        return self.decode_prompt(prompt_ids[-_LAST_PROMPT_TOKENS:]).rstrip()

    def grammar(self, constraint: ReplyConstraint, prompt_ids: Sequence[int]) -> str:
        """Return the grammar of a constrained reply to a prompt (see `reply_grammar`).

        If the prompt ends with `<think>`, the reply begins inside of thoughts; if it ends with
        `</think>`, the reply has none. Otherwise it may begin with thoughts if the chat template
        mentions them.

        Raises:
            GrammarError: a schema cannot be expressed.
        """
        prompt_end = self.prompt_end(prompt_ids)
        thoughts: Thoughts = "optional" if self._mentions_thoughts else "none"
        if prompt_end.endswith("<think>"):
            thoughts = "open"
        elif prompt_end.endswith("</think>"):
            thoughts = "none"
        return self._cached_grammar(constraint, thoughts)

    def _write_grammar(self, constraint: ReplyConstraint, thoughts: Thoughts) -> str:
        syntax = ReplySyntax(
            tool_format=self.tool_format,
            ends=self.stop,
            thoughts=thoughts,
            special_tokens=self._safe.special_tokens,
        )
        return reply_grammar(constraint, syntax)

    def decode_next(self, stream: DecodeStream, token: int) -> str | None:
        """Return the text that the next token of a reply completes.

        Returns:
            "" if the token completes no character, or ends the reply; None if the token is special.
        """
        if token in self.stop:
            return ""
        if token in self._safe.special_ids:
            return None
        return stream.step(self._tokenizer.backend_tokenizer, token) or ""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token of a reply adds.

        A token that completes no character, or ends the reply, adds "".
        """
        stream = DecodeStream(skip_special_tokens=False)
        backend = self._tokenizer.backend_tokenizer
        texts = []
        for token in token_ids:
            text = None if token in self.stop else stream.step(backend, token)
            texts.append(text or "")
        return texts

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        """Return the template's text of a chat, from the cache if it depends on neither tools nor the time."""
        if tools or self._depends_on_time:
            return self._apply_template(messages, tools)
        return self._cached_text(tuple(messages))

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        opens_reply: bool = True,
    ) -> str:
        """Return the template's text of a chat; with `opens_reply`, up to where the next reply begins."""
        if self.tool_format == "fenced":
            messages = write_tools_as_text(messages, tools)
            tools = ()
        chat = [
            self._safe.protect(_template_fields(message), is_reply=bool(message.raw))
            for message in messages
        ]
        functions = self._safe.protect([tool.function for tool in tools])
        text = self._tokenizer.apply_chat_template(
            chat,
            tools=functions or None,
            add_generation_prompt=opens_reply,
            tokenize=False,
            **self._arguments,
        )
        return str(text)


def _placeholder(reply: str) -> str:
    """Return a stand-in for a reply with marks in place of its thoughts and of its text."""
    thoughts, end_of_thoughts, _ = reply.lstrip().rpartition("</think>")
    if not end_of_thoughts:
        return _TEXT_MARK
    start = "<think>\n" if thoughts.startswith("<think>") else ""
    has_thoughts = bool(thoughts.removeprefix("<think>").strip())
    mark = _THOUGHTS_MARK if has_thoughts else ""
    return f"{start}{mark}\n</think>\n\n{_TEXT_MARK}"


def _template_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message for a chat template; the content of a sampled reply is its raw text."""
    if message.raw:
        return {"role": message.role, "content": message.raw}
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.calls
        ]
    if message.answers:
        fields["tool_call_id"] = message.answers
    return fields


def _reply_ends(model: Path | str, *known_ends: int | None) -> tuple[int, ...]:
    """Return the ids that end a reply: `known_ends`, then those of generation_config.json.

    Raises:
        ModelError: there is none, or the file is not readable.
    """
    path = Path(model) / "generation_config.json"
    try:
        configured = read_json(path).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not readable ({error}); expected a JSON object") from error
    more_ends = configured if isinstance(configured, list) else [configured]
    ends = [end for end in (*known_ends, *more_ends) if end is not None]
    if not ends:
        raise ModelError(f"{model}: no token ends a reply; set eos_token in tokenizer_config.json")
    return tuple(dict.fromkeys(ends))
