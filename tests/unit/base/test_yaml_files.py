"""YAML files: a key is given once, and aliases are bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollout.base.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"key 'a' is there twice.*line 3, column 1"),
        ("runs:\n- {a: 1, b: 2}\n- {a: 1, a: 1}\n", r"key 'a' is there twice.*line 3, column 10"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(yaml.YAMLError, match=message):
        read_yaml(path)


@pytest.mark.parametrize("depth", [100, 20_000])
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("[" * depth + "1" + "]" * depth)
    with pytest.raises(yaml.YAMLError, match="values nested deeper than 100"):
        read_yaml(path)
    path.write_text("[" * 99 + "1" + "]" * 99)
    assert read_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{1: a, '1': b, 1.0: c}",  # an integer, a text and a number
        "one: {x: &a {<<: {k: 0, j: 1}, k: 1}}\ntwo: {<<: *a, k: 3}\n",
    ],
)
def test_other_files_are_read_as_pyyaml_reads_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert read_yaml(path) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11)),
            "more than 1000000 values with its aliases",
        ),
        ("a: &a [*a]\n", "values nested deeper than 100"),
    ],
    ids=["exponential", "endless"],
)
def test_aliases_that_stand_for_too_many_values_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(yaml.YAMLError, match=message):
        read_yaml(path)


@pytest.mark.parametrize("value", ["2024-13-01", "0b_", "9" * 5000])
def test_a_value_that_cannot_be_converted_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"a: {value}\n")
    with pytest.raises(yaml.YAMLError, match=r"a\.yaml has a value that cannot be converted: "):
        read_yaml(path)


def test_a_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("ü: 1".encode("latin-1"))
    with pytest.raises(yaml.YAMLError, match=r"a\.yaml is not in UTF-8: .*; save it as UTF-8"):
        read_yaml(path)
