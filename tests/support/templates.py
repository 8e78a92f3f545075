"""Chat templates like those of published models, and a tokenizer of bytes with their special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.models.chat_template import Renderer

_HERMES_TOOLS = (
    "{{ '\\n\\n# Tools\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    '{{ \'\\n</tools>\\n\\nFor each call, return\\n<tool_call>\\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\\n</tool_call>' }}"
)
_HERMES_CALLS = (
    '{%- for call in message.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}"
)
_HERMES_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
)
_SYSTEM = (
    "{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}"
    "{%- if tools %}" + _HERMES_TOOLS + "{%- endif %}{{ '<|im_end|>\\n' }}{%- endif %}"
)
QWEN25 = (
    _SYSTEM + "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- elif message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' + message.content }}" + _HERMES_CALLS + "{{ '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}" + _HERMES_RESULTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Thoughts before the last question are omitted; those after it, between calls of tools, stay.
QWEN3 = (
    _SYSTEM
    + "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{ '<|im_start|>assistant\\n' + content }}{%- endif %}"
    + _HERMES_CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}" + _HERMES_RESULTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
_HEADER = "{{ '<|start_header_id|>%s<|end_header_id|>\\n\\n' }}"
LLAMA3 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' or tools %}"
    + _HEADER % "system"
    + "{{ 'Environment: ipython\\n' if tools else '' }}{%- if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{%- endif %}"
    "{%- for tool in tools or [] %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}{{ '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    + _HEADER
    % "assistant"
    + '{{ \'{"name": "\' + message.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    + _HEADER
    % "ipython"
    + "{{ message.content | tojson }}{{ '<|eot_id|>' }}"
    "{%- elif message.role != 'system' %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    + _HEADER % "assistant"
    + "{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelKind:
    """Chat template and special tokens of a model; ids of special tokens begin at 256.

    Attributes:
        template: text of the chat template; None for the template `chatml` of this package.
        special_tokens: in the order of their ids.
        reply_ends: tokens that end a reply; the first is the tokenizer's end of text.
        begin: token that begins a chat, or None.
    """

    template: str | None
    special_tokens: Sequence[str]
    reply_ends: Sequence[str]
    begin: str | None = None


_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_KINDS = {
    "qwen2.5": _ModelKind(template=QWEN25, special_tokens=_QWEN_TOKENS, reply_ends=["<|im_end|>"]),
    "qwen3": _ModelKind(template=QWEN3, special_tokens=_QWEN_TOKENS, reply_ends=["<|im_end|>"]),
    "llama3": _ModelKind(
        template=LLAMA3,
        special_tokens=_LLAMA_TOKENS,
        reply_ends=["<|eot_id|>", "<|eom_id|>"],
        begin="<|begin_of_text|>",
    ),
    "no_tools": _ModelKind(template=None, special_tokens=_QWEN_TOKENS, reply_ends=["<|im_end|>"]),
}


def byte_tokenizer(
    folder: Path,
    special_tokens: Sequence[str],
    merges: Sequence[tuple[str, str]] = (),
    **named_tokens: str,
) -> Path:
    """Save a tokenizer of bytes in a folder, and return the folder.

    Ids 0 to 255 are the bytes; then come the merges, and then the special tokens.

    Args:
        folder: folder to save the tokenizer in.
        special_tokens: special tokens.
        merges: pairs of tokens that are merged into one.
        named_tokens: `eos_token` and other named special tokens.
    """
    byte_texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged_texts = [first + second for first, second in merges]
    vocabulary = {text: number for number, text in enumerate([*byte_texts, *merged_texts])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named_tokens)
    fast_tokenizer.save_pretrained(str(folder))
    return folder


def renderer_of(name: str, folder: Path, **arguments: object) -> Renderer:
    """Save the tokenizer and the chat template of a kind of model, and return their renderer.

    Args:
        name: key of `_KINDS`.
        folder: folder to save them in.
        arguments: variables of the template.
    """
    kind = _KINDS[name]
    named_tokens = {"eos_token": kind.reply_ends[0]}
    if kind.begin is not None:
        named_tokens["bos_token"] = kind.begin
    byte_tokenizer(folder, kind.special_tokens, **named_tokens)
    if len(kind.reply_ends) > 1:
        end_ids = [256 + kind.special_tokens.index(token) for token in kind.reply_ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    if kind.template is None:
        return Renderer(folder, template="chatml")
    (folder / "chat_template.jinja").write_text(kind.template)
    return Renderer(folder, arguments=arguments)


def call(name: str, arguments: str = "{}") -> str:
    """Return a tool call as Qwen writes it; `arguments` are a JSON object."""
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'
