"""Files that a patch cannot change."""

from __future__ import annotations

import pytest

from rollout.environments.protected_files import protect_files

CHECKOUT = {
    "pkg/__init__.py": "",
    "pkg/m.py": "x = 1\n",
    "pkg/tests/helpers.py": "def same(a, b):\n    assert a == b\n",
    "setup.cfg": "[tool:pytest]\n",
    "src/yaml/__init__.py": "",
}


@pytest.mark.parametrize(
    "path",
    [
        "pkg/m.py",
        "pkg/new.py",
        "pkg/json.py",
        "pkg/new/__init__.py",
        "newmodule.py",
        "docs/page.rst",
        "src/yaml/more.py",
        "pkg/contest.py",
    ],
)
def test_a_patch_may_change_the_product(path: str) -> None:
    patched = {**CHECKOUT, "pkg/new/__init__.py": "", path: "y = 2\n"}
    assert protect_files(CHECKOUT, patched, ["hidden.py"])[path] == "y = 2\n"


@pytest.mark.parametrize(
    "path",
    [
        "hidden.py",
        "conftest.py",
        "pkg/conftest.py",
        "setup.cfg",
        "pytest.ini",
        "pkg/tests/helpers.py",
        "pkg/test_m.py",
        "pytest.py",
        "_pytest/reports.py",
        "unittest/__init__.py",
        "json.py",
        "src/decimal.py",
        "numpy/__init__.py",
        "sitecustomize.py",
        "evil.pth",
        "evil.dist-info/entry_points.txt",
        "pkg/__pycache__/m.cpython-311.pyc",
    ],
)
def test_a_patch_does_not_change_tests_settings_and_names_of_installed_modules(path: str) -> None:
    patched = {**CHECKOUT, path: "evil\n"}
    assert protect_files(CHECKOUT, patched, ["hidden.py"]).get(path) == CHECKOUT.get(path)


def test_a_file_of_the_tests_cannot_be_removed() -> None:
    patched = {path: text for path, text in CHECKOUT.items() if path != "pkg/tests/helpers.py"}
    assert protect_files(CHECKOUT, patched, []) == CHECKOUT
