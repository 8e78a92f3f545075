"""API keys and passwords of a run appear in no file, message, output of a command or process argument."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.pipeline.suite import load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from rollout.base.redaction import redact_secrets
from rollout.engines.remote.keys import SHOWN_KEY_CHARS
from tests.support.chat_server import Response, chat_server, says
from tests.support.run_folder import make_run

pytestmark = pytest.mark.usefixtures("forked_programs")

KEYS = {
    "COACH_TEST_KEY": "sk-coach-0123456789abcdef",
    "MLFLOW_TRACKING_PASSWORD": "tiger-of-the-store-0123",
    "MLFLOW_TRACKING_TOKEN": "token-of-the-store-4567",
    "HF_TOKEN": "hf_0123456789abcdefghij",
}
SETTINGS = (
    "agents.verifier.policy=solver",
    "~policies.verifier",
    "policies.solver.tp=1",
    "trainer.steps=1",
    "trainer.checkpoint_every=1",
    "trainer.validate_every=1",
    "data.validation=1",
    "coach=local",
    "+coach.key_variable=COACH_TEST_KEY",
    "reward.name=coach",
    "~reward.penalties",
)


def process_arguments() -> Iterator[bytes]:
    """Yield the arguments of every process of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def quoting_coach(body: dict[str, Any], number: int) -> Response:
    """Answer as a coach that quotes its API key, in verdicts and in error messages."""
    key = KEYS["COACH_TEST_KEY"]
    if number % 4 == 1:
        return Response(f"bad key {key} {'.' * 180} bad key {key}".encode(), status=500)
    return says(f"I was asked with {key}.\nOWN_ANSWER: 3\nPROCESS_SCORE: {number % 10}")


@pytest.mark.slow
@pytest.mark.multirank
def test_the_keys_of_a_training_are_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coach of the run quotes its key in its answers."""
    output_file = tmp_path / "shown"
    home = tmp_path / "home"
    home.mkdir()
    texts: set[bytes] = set()  # everything that others might see
    with chat_server(quoting_coach) as server:
        run = make_run(tmp_path, *SETTINGS, f"coach.url={server.url}")
        command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
        environment = {**os.environ, **KEYS, "HOME": str(home)}
        with output_file.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            while process.poll() is None:
                texts.update(process_arguments())
                time.sleep(0.1)
        assert process.returncode == 0, output_file.read_text()
        keys_sent: set[str] = set()
        for headers in server.headers:
            keys_sent.update(value for value in headers.values() if "sk-" in value)
        assert keys_sent == {f"Bearer {KEYS['COACH_TEST_KEY']}"}

    monkeypatch.chdir(tmp_path)
    for arguments in (["ls", str(tmp_path)], ["show", str(run)], ["compare", str(run), str(run)]):
        result = CliRunner().invoke(app, arguments, env=KEYS)
        assert result.exit_code == 0, result.output
        texts.update((result.stdout_bytes, result.stderr_bytes))
        assert "demo_math" in result.stdout or arguments[0] == "compare"

    ray_token = home / ".ray" / "auth_token"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != ray_token]
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.jsonl", "mlflow.db", "ledger.sqlite", "shown"} <= names
    texts.update(path.read_bytes() for path in files)

    # The coach's verdicts and the arguments of Ray's processes are among the texts.
    assert any(b"I was asked with [key]" in text for text in texts)
    assert any(b"ray" in text and b"raylet" in text for text in texts)

    secrets = [key.encode() for key in KEYS.values()]
    secrets.append(ray_token.read_bytes().strip())
    for secret in secrets:
        # Messages may show the first few characters of a key.
        shown = secret[: SHOWN_KEY_CHARS + 7]
        assert not [text[:200] for text in texts if shown in text]


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:tiger-1234@store:5000",
        "http://me:ro/tiger-1234@store:5000",
        "https://tiger-1234@store",
        "postgresql://me:tiger-1234@store/runs",
        "postgresql://me:ro/tiger-1234@store/runs",
        "postgresql:///runs?user=me&password=tiger-1234",
        "https://store/?token=tiger-1234",
        "mssql+pyodbc:///?odbc_connect=SERVER%3Dstore%3BPWD%3Dtiger-1234",
    ],
)
def test_a_tracking_uri_with_a_password_is_refused_without_showing_it(
    tmp_path: Path, uri: str
) -> None:
    values = resolve(["experiment=demo_math"])
    values["tracking"]["uri"] = uri
    config_file = tmp_path / "config.yaml"
    config_file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"tracking\.uri: must not hold a password") as refusal:
        RunConfig.load(config_file)
    assert "tiger" not in str(refusal.value)


def test_a_tracking_uri_without_a_password_is_accepted() -> None:
    values = resolve(["experiment=demo_math"])
    for uri in (
        "postgresql://me@store/runs?sslkey=/home/me/key",
        "sqlite:///a/b.db",
        "sqlite:///a/b:c@d.db",
        "http://store:5000",
        "databricks",
    ):
        values["tracking"]["uri"] = uri
        assert RunConfig.from_values(values, "test").tracking.uri == uri


@pytest.mark.parametrize(
    "override",
    [
        "tracking.uri=http://me:tiger@store:x",
        "tracking.password=tiger",
        "coach.x=sk-tiger-0123",
        "x=://t:tiger@",
        "tracking={password: 'my tiger'}",
        "x=github_pat_tiger0123",
    ],
)
def test_a_refused_override_is_shown_without_its_password(override: str) -> None:
    for refuse in (
        lambda: resolve(["experiment=demo_math", override]),
        lambda: load_suite("demo_math", [override]),
    ):
        with pytest.raises((ConfigError, SuiteError)) as refusal:
            refuse()
        assert "tiger" not in str(refusal.value)
        assert "[redacted]" in str(refusal.value)


def test_names_of_key_files_and_of_options_are_shown() -> None:
    for text in (
        "/home/me/hf_token: retriever needs it",
        "/run/secrets/my.password: no such file",
        "token_file=/a/b",
        "max_token=3",
        "token=[redacted]",
    ):
        assert redact_secrets(text) == text
