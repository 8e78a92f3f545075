"""Look-up of names in a config: registered names, names of installed packages, and import paths."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rollout.base.hints import nearest_hint

_T = TypeVar("_T")
# If more names than this are registered, an error that suggests similar names does not list all of them.
_MOST_LISTED = 30
_MOVED = ("mcore_mas.rollout", "mcore_mas.retrieval")  # packages of version 0.1.0

# Objects that a script or notebook passed to `mcore_mas.api`, by names such as "here:run.reward".
LOCAL_OBJECTS: dict[str, Any] = {}


class UnknownName(ValueError):
    """A name in a config is neither registered nor an import path that can be imported."""


def lookup(kind: str, name: str, registered: Mapping[str, _T], *, importable: bool = True) -> _T:
    """Return the object with a name.

    The name is a key of `registered` or of `LOCAL_OBJECTS`, an entry point of an installed package
    in the group `mcore_mas.KIND` (with underscores for spaces), or an import path
    "package.module:attribute".

    Args:
        kind: kind of the object, as errors name it, such as "env".
        registered: objects by name.
        importable: False if only the names in `registered` are allowed.

    Raises:
        UnknownName: the name is not known, or its import path cannot be imported.
    """
    if name in registered:
        return registered[name]
    if importable and name in LOCAL_OBJECTS:
        return LOCAL_OBJECTS[name]  # type: ignore[no-any-return]
    if name.startswith("here:"):
        raise UnknownName(
            f"{kind} '{name}' is an object of the script or notebook that made this run; use the run there, such as "
            "run.chat(), or define the object at the top level of the script, train below "
            '`if __name__ == "__main__":`, and train again'
        )
    path = name
    if importable and ":" not in name:
        for entry_point in entry_points_of(kind):
            if entry_point.name == name:
                path = entry_point.value
                break
    if not importable or ":" not in path:
        nearest_names = nearest_hint(name, registered)
        all_names = f"; known: {', '.join(sorted(registered))}"
        if nearest_names and len(registered) > _MOST_LISTED:
            all_names = ""
        or_path = " (or package.module:attribute)" if importable else ""
        raise UnknownName(f"unknown {kind} '{name}'{nearest_names}{all_names}{or_path}")
    return _import(kind, path)  # type: ignore[no-any-return]


def lookup_import(kind: str, name: str, paths: Mapping[str, str]) -> Any:
    """Return the object with a name, where the registered objects are import paths.

    Raises:
        UnknownName: as `lookup`.
    """
    target: Any = lookup(kind, name, paths)
    return _import(kind, target) if isinstance(target, str) else target


@cache
def entry_points_of(kind: str) -> tuple[EntryPoint, ...]:
    """Return the entry points that installed packages offer for a kind."""
    return tuple(entry_points(group=f"mcore_mas.{kind.replace(' ', '_')}"))


def _import(kind: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code may raise anything
        message = " ".join(str(error).split())
        if not isinstance(error, ImportError):
            message = f"{type(error).__name__}: {message}"
        if isinstance(error, ModuleNotFoundError):
            message += _missing_module_hint(error.name or "", module_name.partition(".")[0])
        raise UnknownName(f"{kind} '{path}' cannot be imported: {message}") from error
    if not hasattr(module, attribute):
        raise UnknownName(
            f"{kind} '{path}' cannot be imported: module '{module_name}' has no attribute '{attribute}'"
            f"{nearest_hint(attribute, dir(module))}"
        )
    return getattr(module, attribute)


def _missing_module_hint(missing_module: str, imported_package: str) -> str:
    """Return advice on a module that was not found while a package was imported, or ""."""
    if missing_module.startswith(_MOVED):
        return f"; since version 0.2.0 its package is {missing_module.removeprefix('mcore_mas.')}"
    if missing_module == imported_package:
        return f"; run this command in the folder that contains {missing_module}, or add that folder to PYTHONPATH"
    return _nearest_module(missing_module)


def _nearest_module(name: str) -> str:
    """Return a hint at the modules beside a missing one, or "" if its package is missing too."""
    package, _, module_name = name.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", [])
    return nearest_hint(module_name, [module.name for module in pkgutil.iter_modules(folders)])
