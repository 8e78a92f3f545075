"""Start of a training, before its first process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_mas.training.train import train
from rollout.engines.remote import keys
from tests.support.run_folder import make_run

VARIABLE = "RUN_TEST_KEY"


class NothingStartedError(Exception):
    """Raised in place of the start of the first process."""


@pytest.mark.slow
def test_keys_leave_the_environment_before_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_hidden_keys", {})
    monkeypatch.setenv(VARIABLE, "sk-0123456789abcdef")
    environment: dict[str, str] = {}

    @contextmanager
    def record_environment(config: object, log: str) -> Iterator[None]:
        environment.update(os.environ)
        raise NothingStartedError
        yield  # makes this function a generator

    # `open_environments` starts the retriever, which is the first process of a run.
    monkeypatch.setattr("mcore_mas.training.train.open_environments", record_environment)
    run = make_run(tmp_path, "coach=local", f"+coach.key_variable={VARIABLE}", "reward.name=coach")
    with pytest.raises(NothingStartedError):
        train(run / "config.yaml")
    assert environment
    assert VARIABLE not in environment
