"""References by which a config names an object of the user's, such as `my_module:my_reward`."""

import re
import sys
from pathlib import Path
from typing import Any

from rollout.base.lookup import LOCAL_OBJECTS


class ArgumentError(ValueError):
    """An argument of the Python API cannot be used; the message says which one and what to pass."""


def reference_to(target: Any, label: str) -> str:
    """Return the reference by which a config names an object.

    Args:
        target: the object; or a text, such as the name of something that ships, which is returned.
        label: name of an object that cannot be imported, such as a lambda or a function of a
            notebook. It is registered in this process as `here:{label}`.

    Returns:
        `module:name` for an object that can be imported, else `here:{label}`.
    """
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", "")
    import_name = _script_module() if module == "__main__" else module
    is_importable = import_name and getattr(sys.modules.get(str(module)), name, None) is target
    if not is_importable:
        reference = f"here:{label}"
        LOCAL_OBJECTS[reference] = target
        return reference

    reference = f"{import_name}:{name}"
    if module == "__main__":
        # This process must not import its own script a second time.
        LOCAL_OBJECTS[reference] = target
    return reference


def _script_module() -> str:
    """Return the module name of this process's script, or "" if it must not be imported.

    A notebook, an interactive Python and a program that is read from stdin have no module.
    Importing a script without a `__main__` guard would run it again.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if not file or not Path(file).is_file():  # it is "<stdin>" of `python < script.py`
        return ""
    source = Path(file).read_text(encoding="utf-8")
    if re.search(r"^if __name__ ==", source, re.MULTILINE) is None:
        return ""
    spec = getattr(main, "__spec__", None)
    return spec.name if spec else Path(file).stem
