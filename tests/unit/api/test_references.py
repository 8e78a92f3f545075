"""Objects are named in a config by their import path, or by a name of this process."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from mcore_mas.api.references import reference_to
from rollout.base.lookup import LOCAL_OBJECTS, UnknownName, lookup
from tests.support import api


def test_a_name_stays() -> None:
    assert reference_to("math", "x") == "math"


def test_a_function_of_a_module_has_its_import_path() -> None:
    assert reference_to(api.relay, "x") == f"{api.__name__}:relay"


def test_a_lambda_has_a_name_in_this_process() -> None:
    first, second = (lambda: 1), (lambda: 2)
    assert reference_to(first, "run.reward") == "here:run.reward"
    assert reference_to(second, "run.reward") == "here:run.reward"
    assert LOCAL_OBJECTS["here:run.reward"] is second  # as in a notebook, the last one counts


def test_an_object_of_another_process_is_not_found() -> None:
    message = r"^env 'here:none.env' is an object of the script .* as run.chat\(\), or"
    with pytest.raises(UnknownName, match=message):
        lookup("env", "here:none.env", {})


def test_a_script_with_a_main_guard_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "mine.py"
    main = ModuleType("__main__")
    vars(main).update(world=lambda task: task, __file__=str(script), __spec__=None)
    main.world.__module__ = "__main__"
    main.world.__qualname__ = "world"
    monkeypatch.setitem(sys.modules, "__main__", main)

    script.write_text("run = 1\n")  # an import would run it again
    assert reference_to(main.world, "x.env") == "here:x.env"

    script.write_text('if __name__ == "__main__":\n    run = 1\n')
    assert reference_to(main.world, "x.env") == "mine:world"
    assert lookup("env", "mine:world", {}) is main.world  # it is not imported a second time here

    main.__file__ = "<stdin>"  # python < mine.py
    assert reference_to(main.world, "x.env") == "here:x.env"

    del main.__file__  # a notebook
    assert reference_to(main.world, "x.env") == "here:x.env"
