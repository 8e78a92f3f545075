"""What every role promises: its parser takes any text, and a reply without what was asked for is malformed."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout.environments
import rollout.orchestras  # noqa: F401  (registers the roles)
from rollout.teams.roles import ROLES

SAYS_NOTHING = [
    "",
    " \n",
    "I do not know.",
    "\x00",
    "<answer>",
    "</answer>",
    "<answer></answer>",
    "\\boxed{",
    "```python",
    "```python\n```",
    "```python\n \n```",
    "{}",
    "[" * 5000,
    "<a>" * 5000,
    "\\boxed{" * 3000,
    "é" * 20_000,
]
PIECES = [
    "<answer>",
    "</answer>",
    "<verify>yes</verify>",
    "\\boxed{",
    "}",
    "```python\n",
    "```",
    "####",
    "<q 1>",
    "\n",
]


@pytest.mark.parametrize(
    "name", [name for name in ROLES if name != "program_agent"]
)  # who may say what it likes
def test_a_reply_that_says_nothing_is_malformed(name: str) -> None:
    assert [text[:20] for text in SAYS_NOTHING if ROLES[name].parse(text) is not None] == []


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=8)).map("".join))
def test_no_text_breaks_a_parser(text: str) -> None:
    for role in ROLES.values():
        parsed = role.parse(text)
        assert parsed is None or isinstance(parsed, str), role.name


@pytest.mark.parametrize("name", ROLES)
def test_its_prompt_has_a_slot_for_what_it_is_about_and_braces_in_texts_are_left_alone(
    name: str,
) -> None:
    role = ROLES[name]
    slots = [slot for _, slot, _, _ in string.Formatter().parse(role.user) if slot]
    assert slots, name
    said = role.messages(**dict.fromkeys(slots, "{braces} <tag>"))[-1].content
    assert said.count("{braces} <tag>") == len(slots)
