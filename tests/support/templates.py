"""Chat templates in the shape of published ones, and a tokenizer of bytes that has their special tokens."""

from __future__ import annotations

from collections.abc import Sequence
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
# thoughts before the last question are left out; those since then, which lead from tool to tool, stay
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
_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 256, 257, 258
_LLAMA_TOKENS = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
_KINDS = {
    "qwen2.5": (QWEN25, _QWEN_TOKENS, "<|im_end|>", None, []),
    "qwen3": (QWEN3, _QWEN_TOKENS, "<|im_end|>", None, []),
    "llama3": (
        LLAMA3,
        [*_LLAMA_TOKENS, "<|python_tag|>"],
        "<|eot_id|>",
        "<|begin_of_text|>",
        ["<|eom_id|>"],
    ),
    "no_tools": ("chatml", _QWEN_TOKENS, "<|im_end|>", None, []),
}


def byte_tokenizer(
    folder: Path, special: list[str], merges: Sequence[tuple[str, str]] = (), **named: str
) -> Path:
    """A folder with a tokenizer of bytes, ids 0 to 255, and behind them what is merged, and special tokens."""
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(str(folder))
    return folder


def renderer_of(kind: str, folder: Path, **arguments: object) -> Renderer:
    """A renderer with a template of `_KINDS`."""
    template, special, end, begin, further = _KINDS[kind]
    named = {"eos_token": end} | ({"bos_token": begin} if begin else {})
    byte_tokenizer(folder, special, **named)
    if further:
        ids = [256 + special.index(token) for token in (end, *further)]
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    if template == "chatml":
        return Renderer(folder, template="chatml")
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder, arguments=arguments)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'
