"""Grammars of replies: the tokens that they allow, tool calls of each format, and thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.models.chat_template import Renderer
from rollout.models.grammars import (
    GrammarError,
    Grammars,
    ReplyConstraint,
    ReplySyntax,
    reply_grammar,
    unpack_masks,
)
from rollout.models.tool_calls import ToolSchema, parse_reply
from tests.support.templates import byte_tokenizer, renderer_of

VOCAB = 300
MOVE = ToolSchema(
    name="move",
    description="",
    parameters={
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/side"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"side": {"enum": ["left", "right"]}},
    },
)
STOP = ToolSchema(name="stop", description="", parameters={})


def write_config(folder: Path) -> None:
    """Write the sizes of a model of `VOCAB` tokens, more than its tokenizer has."""
    config = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))


def allowed_tokens(folder: Path, grammar: str, token_ids: list[int]) -> list[list[int]]:
    """Return the tokens that a grammar allows at each token of a reply."""
    masks = np.stack(Grammars(folder).masks(grammar, token_ids))
    return [np.flatnonzero(row).tolist() for row in unpack_masks(masks, VOCAB)]


def json_grammar(schema: dict[str, Any], end: int) -> str:
    syntax = ReplySyntax(tool_format="hermes", ends=(end,))
    return reply_grammar(ReplyConstraint.of(schema, ()), syntax)


def test_masks_have_every_token_that_continues_the_text(tmp_path: Path) -> None:
    """`ab` and `b"` are single tokens too; a token may cross the end of a string."""
    byte_tokenizer(tmp_path, ["<end>"], [("a", "b"), ("b", '"')], eos_token="<end>")
    write_config(tmp_path)
    tokenizer = Renderer(tmp_path, template="plain")
    a, b, c, quote = (tokenizer.encode(text)[0] for text in ("a", "b", "c", '"'))
    ab = 256
    b_quote = 257
    end = 258
    grammar = json_grammar({"enum": ["ab", "ac"]}, end)
    assert allowed_tokens(tmp_path, grammar, [quote, a, b_quote, end]) == [
        [quote],
        [a, ab],
        [b, c, b_quote],
        [end],
    ]
    assert allowed_tokens(tmp_path, grammar, [quote, ab, quote, end]) == [
        [quote],
        [a, ab],
        [quote],
        [end],
    ]
    with pytest.raises(GrammarError, match=f"token 2 of the reply, {a}, is not one"):
        Grammars(tmp_path).masks(grammar, [quote, a, a])


def test_a_reply_ends_with_any_of_its_end_tokens(tmp_path: Path) -> None:
    renderer = renderer_of("llama3", tmp_path)
    write_config(tmp_path)
    grammar = renderer.grammar(ReplyConstraint.of({"type": "integer"}, ()), (1,))
    seven = renderer.encode("7")[0]
    digits = [renderer.encode(str(digit))[0] for digit in range(10)]
    after_seven = allowed_tokens(tmp_path, grammar, [seven, renderer.stop[1]])[1]
    assert after_seven == sorted([*digits, *renderer.stop])


def spell(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.encode(text), renderer.stop[0]]


@pytest.mark.parametrize("kind", ["qwen2.5", "llama3", "no_tools"])
def test_calls_of_each_format_are_those_that_the_parser_reads(kind: str, tmp_path: Path) -> None:
    renderer = renderer_of(kind, tmp_path)
    write_config(tmp_path)
    constraint = ReplyConstraint.of(None, [MOVE, STOP])
    grammar = renderer.grammar(constraint, (1,))
    move = '{"name": "move", "%s": {"to": "left"}}'
    stop = '{"name": "stop", "%s": {}}'
    replies = {
        "qwen2.5": [
            f"<tool_call>\n{move % 'arguments'}\n</tool_call>",
            f"<tool_call>\n{move % 'arguments'}\n</tool_call>\n"
            f"<tool_call>\n{stop % 'arguments'}\n</tool_call>",
        ],
        "llama3": [move % "parameters", f"{move % 'parameters'}; {stop % 'parameters'}"],
        "no_tools": [
            f"```tool\n{move % 'arguments'}\n```",
            f"```tool\n{move % 'arguments'}\n```\n```tool\n{stop % 'arguments'}\n```",
        ],
    }[kind]
    for reply, names in zip(replies, (["move"], ["move", "stop"]), strict=True):
        Grammars(tmp_path).masks(grammar, spell(renderer, reply))
        parsed = parse_reply(reply, renderer.tool_format, "c")
        assert [call.name for call in parsed.calls] == names
        assert json.loads(parsed.calls[0].arguments) == {"to": "left"}

    single = renderer.grammar(ReplyConstraint.of(None, [MOVE, STOP], parallel_calls=False), (1,))
    Grammars(tmp_path).masks(single, spell(renderer, replies[0]))
    for other in (replies[1], replies[0].replace("left", "up"), "Left.", f" {replies[0]}"):
        with pytest.raises(GrammarError):
            Grammars(tmp_path).masks(single, spell(renderer, other))


def test_calls_may_take_the_place_of_json(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    write_config(tmp_path)
    grammar = renderer.grammar(ReplyConstraint.of({"type": "boolean"}, [STOP]), (1,))
    for reply in ("true", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'):
        token_ids = spell(renderer, reply)
        assert len(Grammars(tmp_path).masks(grammar, token_ids)) == len(token_ids)


def test_a_special_token_of_a_format_is_that_token() -> None:
    syntax = ReplySyntax(
        tool_format="hermes", ends=(1,), special_tokens={"<tool_call>": 7, "</tool_call>": 8}
    )
    assert syntax.literal('<tool_call>\n{"a"}</tool_call>') == r'<[7]> "\n{\"a\"}" <[8]>'


def test_thoughts_precede_a_reply_if_the_template_has_them(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    write_config(tmp_path)
    constraint = ReplyConstraint.of({"type": "boolean"}, ())
    thought = "<think>\nIs it? </thin\n</think>\n\n"
    whole = f"{thought}true"
    begun = whole.removeprefix("<think>")
    prompts = {"": ["true", whole], "<think>": [begun, whole]}
    prompts["<think>\n\n</think>\n\n"] = ["true"]
    for prompt, accepted in prompts.items():
        grammar = renderer.grammar(constraint, renderer.encode(f"assistant\n{prompt}"))
        for reply in ("true", whole, begun):
            if reply in accepted:
                Grammars(tmp_path).masks(grammar, spell(renderer, reply))
            else:
                with pytest.raises(GrammarError):
                    Grammars(tmp_path).masks(grammar, spell(renderer, reply))


def test_keywords_that_no_grammar_expresses_are_left_out(tmp_path: Path) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    write_config(tmp_path)
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    grammar = renderer.grammar(ReplyConstraint.of(schema, ()), (1,))
    token_ids = spell(renderer, "[1, 1]")
    assert len(Grammars(tmp_path).masks(grammar, token_ids)) == len(token_ids)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "pattern": "^(?=a)b"}, "look-ahead"),
        ({"$ref": "https://example.org/schema"}, "not present"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
    ],
)
def test_a_schema_without_a_grammar_is_named(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(GrammarError, match=problem):
        json_grammar(schema, 1)
