"""Contract of the roles: their parsers accept any text, and refuse replies without the requested content."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout.environments
import rollout.orchestras  # noqa: F401  (registers the roles)
from rollout.orchestras.replies import parse_spoken
from rollout.teams.roles import ROLES

# Replies without content for any role
EMPTY_REPLIES = [
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
# Roles that may reply anything; a game judges the actions of its players.
UNPARSED_ROLES = {name for name, role in ROLES.items() if role.parse is parse_spoken}
# Pieces of which random replies are made
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


@pytest.mark.parametrize("name", sorted(ROLES.keys() - UNPARSED_ROLES))
def test_an_empty_reply_is_malformed(name: str) -> None:
    accepted = [text[:20] for text in EMPTY_REPLIES if ROLES[name].parse(text) is not None]
    assert accepted == []


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=8)).map("".join))
def test_no_text_breaks_a_parser(text: str) -> None:
    for role in ROLES.values():
        parsed = role.parse(text)
        assert parsed is None or isinstance(parsed, str), role.name


@pytest.mark.parametrize("name", ROLES)
def test_a_prompt_has_slots_whose_texts_may_contain_braces(name: str) -> None:
    role = ROLES[name]
    slots = [slot for _, slot, _, _ in string.Formatter().parse(role.user) if slot]
    assert slots, name
    prompt = role.messages(**dict.fromkeys(slots, "{braces} <tag>"))[-1].content
    assert prompt.count("{braces} <tag>") == len(slots)
