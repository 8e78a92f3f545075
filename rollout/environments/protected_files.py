"""Files of a checkout that a patch cannot change.

They are tests, settings of pytest and of the interpreter, compiled code, metadata of packages, and new
modules that would be imported in place of installed ones.
"""

import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import PurePosixPath

# Files that configure pytest or the interpreter.
_SETTINGS = {
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
    "pyvenv.cfg",
}
_PROTECTED_SUFFIXES = (".pth", ".pyc", ".so")  # import paths and compiled code
_METADATA_SUFFIXES = (".dist-info", ".egg-info")  # folders that may register plug-ins of pytest
# Folders of tests, by which SWE-bench separates the patch of the tests from the repair.
_TEST_FOLDERS = {"test", "tests", "testing", "e2e"}
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|tests?\.py")
# Folders of a checkout that are on the import path; "" is its root.
_IMPORT_FOLDERS = {"", "src", "lib"}


def protect_files(
    original: Mapping[str, str], patched: Mapping[str, str], hidden_paths: Collection[str]
) -> dict[str, str]:
    """Return the patched files with all protected files as they were.

    Args:
        original: files of the checkout by path.
        patched: files after the agent's patch.
        hidden_paths: paths of files that the hidden tests bring or change.
    """
    checkout_modules = _top_level_names(original)
    files = {}
    for path in {**original, **patched}:
        before = original.get(path)
        after = patched.get(path)
        if after != before and _is_protected(
            path,
            is_new=before is None,
            patched=patched,
            hidden_paths=hidden_paths,
            checkout_modules=checkout_modules,
        ):
            after = before
        if after is not None:
            files[path] = after
    return files


def _is_protected(
    path: str,
    *,
    is_new: bool,
    patched: Mapping[str, str],
    hidden_paths: Collection[str],
    checkout_modules: Collection[str],
) -> bool:
    """Return True if a patch cannot change a file, or cannot create it.

    Args:
        path: path of the file.
        is_new: True if the patch creates the file.
        patched: files after the patch.
        hidden_paths: paths of files that the hidden tests bring or change.
        checkout_modules: names of top-level modules of the checkout.
    """
    *folders, name = PurePosixPath(path).parts
    if path in hidden_paths or name in _SETTINGS or name.endswith(_PROTECTED_SUFFIXES):
        return True
    if any(folder.endswith(_METADATA_SUFFIXES) or folder == "__pycache__" for folder in folders):
        return True
    if not _TEST_FOLDERS.isdisjoint(folders) or _TEST_FILE.fullmatch(name):
        return True
    return is_new and _hides_installed_module(path, patched, checkout_modules)


def _hides_installed_module(
    path: str, patched: Mapping[str, str], checkout_modules: Collection[str]
) -> bool:
    """Return True if a new file could be imported in place of an installed module."""
    parts = PurePosixPath(path).parts
    for index, part in enumerate(parts):
        folder = "/".join(parts[:index])
        # A module in a package has the name of the package before its own, and hides nothing.
        is_in_package = folder not in _IMPORT_FOLDERS and f"{folder}/__init__.py" in patched
        name = part.partition(".")[0]
        hides_module = name not in checkout_modules and name in _installed_modules()
        if hides_module and not is_in_package:
            return True
    return False


def _top_level_names(files: Mapping[str, str]) -> set[str]:
    """Return the names of modules in a checkout's root folder or in a source folder."""
    names = set()
    for path in files:
        parts = PurePosixPath(path).parts
        if len(parts) > 1 and parts[0] in _IMPORT_FOLDERS:
            parts = parts[1:]
        names.add(parts[0].removesuffix(".py"))
    return names


@cache
def _installed_modules() -> frozenset[str]:
    """Return the names of the modules of this Python and of its installed packages."""
    return frozenset([*sys.stdlib_module_names, *packages_distributions()])
