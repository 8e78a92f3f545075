"""The location of an error is the line that the user can change."""

import json
from typing import Any

import pytest

from rollout.base.error_location import describe_with_location
from rollout.base.lookup import UnknownName, lookup


def raise_in_this_file() -> None:
    raise KeyError("x")


def raise_in_a_library() -> Any:
    return json.loads("{")


def raise_in_this_project() -> Any:
    return lookup("env", "no such name", {})


def test_the_line_is_the_innermost_one_outside_of_libraries() -> None:
    with pytest.raises(KeyError) as caught:
        raise_in_this_file()
    line = raise_in_this_file.__code__.co_firstlineno + 1
    text = describe_with_location(caught.value)
    assert text == f"KeyError: 'x' (test_error_location.py:{line})"

    with pytest.raises(json.JSONDecodeError) as in_library:
        raise_in_a_library()
    line = raise_in_a_library.__code__.co_firstlineno + 1
    assert describe_with_location(in_library.value).endswith(f"(test_error_location.py:{line})")

    with pytest.raises(UnknownName) as in_project:
        raise_in_this_project()
    line = raise_in_this_project.__code__.co_firstlineno + 1
    assert describe_with_location(in_project.value).endswith(f"(test_error_location.py:{line})")


def test_an_error_that_was_never_raised_has_no_line() -> None:
    assert describe_with_location(ValueError("odd")) == "ValueError: odd"
