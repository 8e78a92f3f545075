"""A request to a server has as long as the longest reply that a config allows may take, and its start as its model."""

from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime import engine_factory
from mcore_mas.runtime.engine_factory import _engine_settings, make_engines
from rollout.engines import EngineConfig


def test_a_reply_of_32768_tokens_ends_before_its_request_does() -> None:
    config = RunConfig.check(resolve(["experiment=marti_mars2_32b"]), "a test")
    seconds = _engine_settings(config, config.engine, trained=True)["timeout_s"]
    assert (
        seconds > 2 * max(agent.max_tokens for agent in config.agents.values()) / 25
    )  # tokens/s, after a wait


def test_what_is_set_holds_and_short_replies_have_ten_minutes() -> None:
    assert EngineConfig(timeout_s=5.0).request_deadline_s == 5.0
    assert EngineConfig(slots=8, max_length=512).request_deadline_s == 600.0


def test_a_server_has_time_to_read_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(64 * 10**9)
    monkeypatch.setattr(
        engine_factory, "engine_class", lambda name: lambda model, **settings: settings["start_s"]
    )
    for start_s, expected in (("null", 900 + 640), ("77", 77)):
        config = RunConfig.check(
            resolve(["experiment=marti_mars2_32b", f"+engine.start_s={start_s}"]), "a test"
        )
        started = make_engines(config, {"generator_1": tmp_path}, tmp_path, trained=False)
        assert started == {"generator_1": expected}
