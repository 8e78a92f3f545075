"""Renderer.extend: a chat's next prompt continues the sampled tokens unless its template rewrites them."""

from pathlib import Path

import pytest

from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, Turn
from tests.support.played import turn
from tests.support.templates import renderer_of

TOOLS = (
    ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}}),
)
SYSTEM = Message(role="system", content="S")
QUESTION = Message(role="user", content="1+1?")
RESULT = Message(role="tool", content="2", answers="0")
# Without the spaces that templates write into JSON.
CALL = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'


def sampled(
    renderer: Renderer, raw: str, *messages: Message, end: int | None = None
) -> tuple[Turn, Message]:
    """Return a turn that sampled `raw` in a chat, and the message of its reply.

    Args:
        renderer: of the model.
        raw: text of the reply.
        messages: of the chat.
        end: token that ended the reply; None for the first of `renderer.stop`.
    """
    last_token = renderer.stop[0] if end is None else end
    return _turn(renderer, messages, (*renderer.encode(raw), last_token)), _reply(raw)


def cut_off(renderer: Renderer, raw: str, *messages: Message) -> tuple[Turn, Message]:
    """Return a turn whose reply was cut off, and the message of its reply."""
    return _turn(renderer, messages, renderer.encode(raw)), _reply(raw)


def _turn(renderer: Renderer, messages: tuple[Message, ...], token_ids: tuple[int, ...]) -> Turn:
    prompt_ids = renderer.render(messages, TOOLS)
    return turn(0, prompt_ids=prompt_ids, completion_ids=token_ids, messages=messages)


def _reply(raw: str) -> Message:
    return Message(role="assistant", content="", raw=raw)


TEXTS_AFTER_REPLY = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "no_tools": "\n<|im_start|>user\nResult of the tool:\n2<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("kind", TEXTS_AFTER_REPLY)
def test_a_tool_result_follows_the_sampled_tokens(kind: str, tmp_path: Path) -> None:
    renderer = renderer_of(kind, tmp_path)
    before, reply = sampled(renderer, f"  {CALL}\n\n", SYSTEM, QUESTION)
    ids = renderer.extend(before, (SYSTEM, QUESTION, reply, RESULT), TOOLS)
    assert ids is not None
    # The spaces and the JSON stay as they were sampled.
    sampled_ids = before.prompt_ids + before.completion_ids
    assert ids[: len(sampled_ids)] == sampled_ids
    assert renderer.decode_prompt(ids[len(sampled_ids) :]) == TEXTS_AFTER_REPLY[kind]


def test_qwen3_keeps_thoughts_before_a_tool_result(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    before, reply = sampled(renderer, f"<think>\nI add.\n</think>\n\n{CALL}", SYSTEM, QUESTION)
    assert renderer.extend(before, (SYSTEM, QUESTION, reply, RESULT), TOOLS) is not None


def test_qwen3_omits_thoughts_before_the_next_question(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    next_question = Message(role="user", content="Sure?")
    before, reply = sampled(renderer, f"<think>\nI add.\n</think>\n\n{CALL}", SYSTEM, QUESTION)
    messages = (SYSTEM, QUESTION, reply, next_question)
    assert renderer.extend(before, messages, TOOLS) is None
    assert "I add." not in renderer.decode_prompt(renderer.render(messages, TOOLS))

    without_thoughts, reply = sampled(renderer, "2.", SYSTEM, QUESTION)
    messages = (SYSTEM, QUESTION, reply, next_question)
    assert renderer.extend(without_thoughts, messages, TOOLS) is not None


def test_an_empty_thought_in_the_prompt_that_history_omits_is_a_rewrite(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path, enable_thinking=False)
    before, reply = sampled(renderer, "2.", SYSTEM, QUESTION)
    assert renderer.extend(before, (SYSTEM, QUESTION, reply, QUESTION), TOOLS) is None


def test_an_empty_thought_in_the_reply_that_history_omits_is_a_rewrite(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    before, reply = sampled(renderer, f"<think>\n\n</think>\n\n{CALL}", SYSTEM, QUESTION)
    messages = (SYSTEM, QUESTION, reply, RESULT)
    assert "think" not in renderer.decode_prompt(renderer.render(messages, TOOLS))
    assert renderer.extend(before, messages, TOOLS) is None


def test_a_thought_that_the_prompt_opens_is_part_of_the_reply(tmp_path: Path) -> None:
    renderer_of("qwen3", tmp_path)
    path = tmp_path / "chat_template.jinja"
    template = path.read_text()
    generation_prompt = "{{ '<|im_start|>assistant\\n' }}{%- if enable"
    assert generation_prompt in template
    opens_thought = generation_prompt.replace("assistant\\n", "assistant\\n<think>\\n")
    path.write_text(template.replace(generation_prompt, opens_thought))

    renderer = Renderer(tmp_path)
    before, reply = sampled(renderer, f"I add.\n</think>\n\n{CALL}", SYSTEM, QUESTION)
    ids = renderer.extend(before, (SYSTEM, QUESTION, reply, RESULT), TOOLS)
    assert ids is not None
    new_ids = ids[len(before.prompt_ids + before.completion_ids) :]
    assert renderer.decode_prompt(new_ids).endswith("assistant\n<think>\n")


def test_a_reply_that_was_cut_off_gets_its_end_from_the_template(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    before, reply = cut_off(renderer, "It is", SYSTEM, QUESTION)
    ids = renderer.extend(before, (SYSTEM, QUESTION, reply, QUESTION), TOOLS)
    assert ids is not None
    text = renderer.decode_prompt(ids[len(before.prompt_ids) :])
    assert text.startswith("It is<|im_end|>\n<|im_start|>user\n1+1?")


def test_llamas_other_end_of_a_reply_replaces_the_templates(tmp_path: Path) -> None:
    renderer = renderer_of("llama3", tmp_path)
    raw = '{"name": "add", "parameters": {}}'
    before, reply = sampled(renderer, raw, QUESTION, end=renderer.stop[1])
    ids = renderer.extend(before, (QUESTION, reply, RESULT), TOOLS)
    assert ids is not None
    text = renderer.decode_prompt(ids[len(before.prompt_ids) :])
    assert text.startswith(f"{raw}<|eom_id|><|start_header_id|>ipython")


def test_changed_or_missing_messages_before_the_reply_start_a_new_root(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    before, reply = sampled(renderer, "2.", SYSTEM, QUESTION)
    other_question = Message(role="user", content="1+2?")
    assert renderer.extend(before, (SYSTEM, other_question, reply, QUESTION), TOOLS) is None
    assert renderer.extend(before, (SYSTEM, QUESTION), TOOLS) is None
    assert renderer.extend(before, (SYSTEM, QUESTION, QUESTION), TOOLS) is None
