"""A version of megatron-core that nobody tried is named, in one line."""

import warnings
from importlib import metadata

import pytest

from mcore_mas.megatron import cpu as versions


def test_versions_that_were_tried_are_not_mentioned() -> None:
    assert versions.untried("0.16.1") is versions.untried("0.19.2") is None
    assert versions.untried(metadata.version("megatron-core")) is None


def test_a_version_never_tried_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.20.0")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        versions.patch_release()
    (warning,) = said
    told = "megatron-core 0.20.0 has not been tried; tried: 0.16.1, 0.17.1, 0.18.2, 0.19.2; "
    assert str(warning.message).startswith(told)
    assert "\n" not in str(warning.message)
