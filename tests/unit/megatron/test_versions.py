"""Warning about untested versions of megatron-core."""

import warnings
from importlib import metadata

import pytest

from mcore_mas.megatron import versions


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2", metadata.version("megatron-core")])
def test_a_tested_version_has_no_warning(version: str) -> None:
    assert versions.version_warning(version) is None


def test_an_untested_version_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.20.0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.patch_version()
    messages = [str(warning.message) for warning in caught]
    # Megatron's modules, which are imported now at the latest, warn too.
    (message,) = [text for text in messages if text.startswith("megatron-core")]
    assert message.startswith(
        "megatron-core 0.20.0 has not been tested, only 0.16.1, 0.17.1, 0.18.2, 0.19.2; "
    )
    assert "\n" not in message
