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
# Libraries of environments that no registry has in a fitting version (their pages say how to install
# them), libraries of torch for CUDA, and pytest, which runs the tests of repositories in the sandbox
INSTALLED_SEPARATELY = {
    "_pytest",
    "alfworld",
    "pytest",
    "transformer_engine",
    "triton",
    "web_agent_site",
}


def top_level_imports() -> dict[str, str]:
    """Return the top-level names that the packages import, each with a file that imports it."""
    files: list[Path] = []
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    names = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0]: str(path) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names[node.module.split(".")[0]] = str(path)
    return names


@pytest.mark.slow
def test_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = list(project["dependencies"])
    for extra in ("coach", "gymnasium", "mcp", "trackers"):
        entries += project["optional-dependencies"][extra]
    declared = {re.split(r"[=<>\[]", entry)[0].lower() for entry in entries}
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    undeclared = set(sys.stdlib_module_names) | set(PACKAGES) | INSTALLED_SEPARATELY
    for name, path in top_level_imports().items():
        candidates = {distribution.lower() for distribution in distributions.get(name, [])}
        candidates.add(OPTIONAL_LIBRARIES.get(name, name))
        if name not in undeclared and not declared & candidates:
            missing[name] = path
    assert not missing


def locked_versions(file: str) -> dict[str, str]:
    """Return the versions that a lock file pins, by package."""
    versions = {}
    for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
        name, separator, version = line.partition("==")
        if separator:
            versions[canonicalize_name(name)] = version
    return versions


def test_the_locks_of_two_pythons_differ_only_in_megatron_core() -> None:
    lock = locked_versions("lock.txt")
    lock_312 = locked_versions("lock-3.12.txt")
    packages = lock.keys() | lock_312.keys()
    differing = {name for name in packages if lock.get(name) != lock_312.get(name)}
    assert differing == {"megatron-core"}
    assert lock["megatron-core"] in TESTED_VERSIONS
    assert lock_312["megatron-core"] in TESTED_VERSIONS
    assert Version(lock_312["megatron-core"]) == max(map(Version, TESTED_VERSIONS))


def test_servers_and_trainers_compute_masks_with_one_version_of_llguidance() -> None:
    files = ("lock.txt", "lock-3.12.txt", "sglang.txt", "sglang-cpu.txt")
    versions = {locked_versions(file)["llguidance"] for file in files}
    assert len(versions) == 1


def test_direct_dependencies_are_ranges_that_contain_the_locked_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    requirements = [Requirement(entry) for entry in entries]
    for file in ("lock.txt", "lock-3.12.txt"):
        versions = locked_versions(file)
        for requirement in requirements:
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{file}: {requirement}"
    for requirement in requirements:
        assert "==" not in str(requirement.specifier), requirement
        assert "<" in str(requirement.specifier), requirement
