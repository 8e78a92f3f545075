"""ReplyText: the text of a reply grows with its tokens, and ends where a stop is complete."""

from pathlib import Path

import pytest

from rollout.models.chat_template import Renderer
from rollout.models.reply_text import ReplyText
from tests.support.templates import renderer_of

CALL = '<tool_call>{"name": "f"}</tool_call>'
PYTHON_TAG = 261  # in the byte tokenizer with Llama's special tokens


@pytest.fixture
def qwen(tmp_path: Path) -> Renderer:
    return renderer_of("qwen3", tmp_path)


def test_text_grows_character_by_character(qwen: Renderer) -> None:
    reply = ReplyText(qwen, qwen.encode("q"), calls=False)
    texts = [reply.add(position, [token]) for position, token in enumerate(qwen.encode("é!"))]
    assert texts == ["", "é", "é!"]  # "é" has two bytes, and so two tokens


def test_the_end_of_the_reply_adds_no_text(qwen: Renderer) -> None:
    reply = ReplyText(qwen, qwen.encode("q"), calls=False)
    assert reply.add(0, (*qwen.encode("a"), qwen.stop[0])) == "a"


def test_position_0_begins_the_reply_again(qwen: Renderer) -> None:
    reply = ReplyText(qwen, qwen.encode("q"), calls=False, stops=["END"])
    assert reply.add(0, qwen.encode("aENDb")) == "aEND"
    assert reply.end == len("aEND")
    assert reply.add(0, qwen.encode("c")) == "c"
    assert reply.end == 0


def test_a_special_token_ends_the_text_of_a_reply_that_may_call_tools(tmp_path: Path) -> None:
    llama = renderer_of("llama3", tmp_path)
    ids = (*llama.encode("a"), PYTHON_TAG, *llama.encode("b"))
    assert ReplyText(llama, llama.encode("q"), calls=True).add(0, ids) == "a"
    assert ReplyText(llama, llama.encode("q"), calls=False).add(0, ids) == "ab"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("so END", len("so END")),
        ("<think>END</think>no", 0),
        ("<think>END</think>END", len("<think>END</think>END")),
        (f"{CALL.replace('f', 'END')} so", 0),
        (f"{CALL} END", len(f"{CALL} END")),
    ],
)
def test_a_stop_counts_outside_of_thoughts_and_calls(qwen: Renderer, text: str, end: int) -> None:
    reply = ReplyText(qwen, qwen.encode("q"), calls=True, stops=["END"])
    reply.add(0, qwen.encode(text))
    assert reply.end == end


def test_a_thought_that_the_prompt_opens_has_no_stop(qwen: Renderer) -> None:
    reply = ReplyText(qwen, qwen.encode("<think>\n"), calls=False, stops=["END"])
    assert reply.add(0, qwen.encode("END </think> so END")) == "<think>END </think> so END"
    assert reply.end == len("END </think> so END")
    reply.add(0, qwen.encode("END"))
    assert reply.end == 0
