"""Deadlines of requests cover the longest reply, and deadlines of starts the size of the model."""

from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.engine_factory import engine_requests
from rollout.engines import EngineConfig
from rollout.engines.sglang.build import sglang_settings


def test_a_reply_of_32768_tokens_ends_before_its_request_does() -> None:
    config = RunConfig.from_values(resolve(["experiment=marti_mars2_32b"]), "a test")
    longest = max(agent.max_tokens for agent in config.agents.values())
    tokens_per_s = 25
    assert config.engine.request_deadline_s > 2 * longest / tokens_per_s  # after a wait


def test_a_configured_deadline_holds_and_the_default_is_at_least_ten_minutes() -> None:
    assert (
        EngineConfig(name="sglang", python=Path("python"), timeout_s=5.0).request_deadline_s == 5.0
    )
    assert EngineConfig(slots=8, max_length=512).request_deadline_s == 600.0


@pytest.mark.parametrize(("start_s", "expected"), [("null", 900 + 640), ("77", 77)])
def test_a_server_has_time_to_read_a_large_model(
    tmp_path: Path, start_s: str, expected: float
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(64 * 10**9)
    overrides = ["experiment=marti_mars2_32b", f"+engine.start_s={start_s}"]
    config = RunConfig.from_values(resolve(overrides), "a test")
    (request,) = engine_requests(config, {"generator_1": tmp_path}, tmp_path, trained=False)
    settings = sglang_settings(request)
    assert (settings.start_s, settings.timeout_s) == (expected, config.engine.request_deadline_s)
