"""The public names of the Python API and their arguments stay, and the page of the API describes them.

Whoever removes a name or renames an argument breaks programs of users, and writes a line in the
changelog.
"""

import inspect
from importlib.metadata import version
from typing import Any

import pytest

import mcore_mas as mm
from docs.writers.api import API_PAGE, pages, public_methods
from mcore_mas import api

NAMES = """
Advantages AgentSpec Coach Conversation Env Generator Group Run RunLimits Sandbox Status Step Task
TeamSession ToolCall Trajectory Turns last_boxed last_tag load_tasks make_tiny_model register_agent
tool_of
"""
RUN_METHODS = "train arun metrics trajectories trajectories_of explain evaluate export chat"
PARAMETERS = {
    mm.Run: "agents orchestra tasks policies env reward folder settings",
    mm.Run.evaluate: "self k state",
    mm.Run.export: "self to policy",
    mm.Run.chat: "self prompts state",
    mm.Run.explain: "self advantage step task options",
    mm.AgentSpec: "name user system parse policy settings",
    mm.load_tasks: "given split subset columns format limit",
    mm.make_tiny_model: "out_dir",
    mm.register_agent: "name system user",
}


def test_public_names() -> None:
    assert api.__all__ == NAMES.split()
    assert {*NAMES.split(), "__version__"} <= set(dir(mm))
    assert mm.__version__ == version("mcore-mas")
    for name in api.__all__:
        assert getattr(mm, name) is getattr(api, name)


def test_public_methods_of_a_run() -> None:
    assert list(public_methods(mm.Run)) == RUN_METHODS.split()


@pytest.mark.parametrize("function", PARAMETERS)
def test_parameters(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == PARAMETERS[function].split()


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        mm.Trainr  # noqa: B018
    message = r"no attribute 'AgentSpce'; its public names are in mcore_mas.api.__all__; nearest: AgentSpec$"
    with pytest.raises(AttributeError, match=message):
        mm.AgentSpce  # noqa: B018


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = pages()[API_PAGE]
    assert all(f"## `mm.{name}`" in page for name in api.__all__)
    assert "### `Run.evaluate`" in page
    assert "- `tasks`: tasks, (prompt" in page
