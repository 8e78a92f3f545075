"""What every tool promises: a name, a description, and a schema that wrong arguments do not pass."""

import asyncio

import jsonschema
import pytest

from rollout.tools import TOOLS
from rollout.tools.protocol import BadArguments


class Untouched:
    """What a tool works on, which no wrong call may reach."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was called")


@pytest.mark.parametrize("name", TOOLS)
def test_wrong_arguments_are_the_models_mistake_and_reach_nothing(name: str) -> None:
    tool = TOOLS[name]() if name == "calculator" else TOOLS[name](Untouched())
    assert tool.name == name
    assert tool.description
    jsonschema.Draft202012Validator.check_schema(dict(tool.schema))
    assert tool.schema["additionalProperties"] is False
    for arguments in ({}, {"nonsense": 1}, dict.fromkeys(tool.schema["properties"], 7)):
        with pytest.raises(BadArguments, match=f"^{name}: "):
            asyncio.run(tool(**arguments))
