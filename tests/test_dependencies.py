"""Dependencies: every imported library is declared, and the locks and ranges agree."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mcore_mas.megatron.versions import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("retrieval", "rollout", "mcore_mas")

# import name -> distribution, of libraries that are in an extra and imported only where they are used
OPTIONAL_LIBRARIES = {
    "anthropic": "anthropic",
    "google": "google-genai",
    "gymnasium": "gymnasium",
    "mcp": "mcp",
    "wandb": "wandb",
}
# of worlds that cannot be had from a registry in a version that fits (their own pages say how to install them), and
# what torch for CUDA brings; and pytest, which runs the tests of checkouts in the sandbox
INSTALLED_APART = {
    "_pytest",
    "alfworld",
    "pytest",
    "transformer_engine",
    "triton",
    "web_agent_site",
}


def top_level_imports() -> dict[str, str]:
    """Return the top-level names that the packages import, each with a file that imports it."""
    names = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0]: str(path) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names[node.module.split(".")[0]] = str(path)
    return names


@pytest.mark.slow
def test_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    used = ("coach", "gymnasium", "mcp", "trackers")
    entries = [*project["dependencies"], *(entry for name in used for entry in extras[name])]
    declared = {re.split(r"[=<>\[]", entry)[0].lower() for entry in entries}
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    known = set(sys.stdlib_module_names) | set(PACKAGES) | INSTALLED_APART
    for name, path in top_level_imports().items():
        candidates = {distribution.lower() for distribution in distributions.get(name, [])}
        candidates.add(OPTIONAL_LIBRARIES.get(name, name))
        if name not in known and not declared & candidates:
            missing[name] = path
    assert not missing


def locked(name: str) -> dict[str, str]:
    """The versions that a lock pins."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {
        canonicalize_name(name): version
        for name, sign, version in (line.partition("==") for line in lines)
        if sign
    }


def test_the_locks_of_two_pythons_differ_in_megatron_core_alone() -> None:
    older, newer = locked("lock.txt"), locked("lock-3.12.txt")
    differs = {name for name in older.keys() | newer.keys() if older.get(name) != newer.get(name)}
    assert differs == {"megatron-core"}
    assert {older["megatron-core"], newer["megatron-core"]} <= {*TESTED_VERSIONS}
    assert Version(newer["megatron-core"]) == max(map(Version, TESTED_VERSIONS))


def test_direct_dependencies_are_ranges_that_hold_what_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        Requirement(r) for r in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    ]
    for name in ("lock.txt", "lock-3.12.txt"):
        pinned = locked(name)
        assert not [
            str(r) for r in declared if not r.specifier.contains(pinned[canonicalize_name(r.name)])
        ], name
    assert not [str(r) for r in declared if "==" in str(r.specifier) or "<" not in str(r.specifier)]
