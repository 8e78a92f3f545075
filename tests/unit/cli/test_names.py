"""Command `list` prints the names that a config may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_mas.cli.names import REGISTRIES
from mcore_mas.pipeline.project import new_project
from rollout.base.lookup import entry_points_of
from tests.unit.cli.conftest import CallCommand


def test_without_an_argument_the_registries_are_listed(call_command: CallCommand) -> None:
    result = call_command("list")
    assert result.status == 0
    assert result.stdout.splitlines() == list(REGISTRIES)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_registry_is_listed(registry: str, call_command: CallCommand) -> None:
    result = call_command("list", registry)
    assert result.status == 0
    names = result.stdout.splitlines()
    assert names == sorted(names)
    assert len(names) > 1


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("advantage", "drmas"),
        ("reward.name", "shared_outcome"),
        ("rewards", "majority"),
        ("data.generator", "arithmetic"),
        ("loss", "ppo_clip"),
        ("agents.solver.role", "solver"),
        ("agent.tools", "calculator"),
        ("provider", "openai"),
        ("penalty", "invalid"),
        ("experiment", "demo_math_lora"),
        ("team", "solver_verifier"),
        ("recipe", "grpo"),
    ],
)
def test_a_registry_is_known_by_the_key_of_a_config(
    key: str, name: str, call_command: CallCommand
) -> None:
    result = call_command("list", key)
    assert result.status == 0
    assert name in result.stdout.splitlines()


def test_the_users_experiments_and_teams_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_command: CallCommand
) -> None:
    monkeypatch.chdir(new_project("sculptors", tmp_path))
    for registry in ("experiments", "teams"):
        assert "sculptors" in call_command("list", registry).stdout.splitlines()


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that offers an environment for this test."""
    metadata = tmp_path / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[mcore_mas.env]\nchess = theirs:Chess\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry_points_of.cache_clear()
    yield
    entry_points_of.cache_clear()


@pytest.mark.usefixtures("installed_package")
def test_names_of_installed_packages_are_listed_with_the_package(
    call_command: CallCommand,
) -> None:
    assert "chess  (of theirs)" in call_command("list", "envs").stdout.splitlines()
    assert "(of" not in call_command("list", "losses").stdout
