"""The keys that a run holds are in no file of its folder, no line, no list and no process's arguments."""

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
from rollout.base.text import redact_secrets
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


def arguments() -> Iterator[bytes]:
    """What every process of this machine was started with."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


@pytest.mark.slow
@pytest.mark.multirank
def test_no_key_of_a_training_is_seen_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coach quotes the key that it was sent, in its verdicts and in what it says as it fails."""
    secret = KEYS["COACH_TEST_KEY"]

    def judge(body: dict[str, Any], number: int) -> Response:
        if number % 4 == 1:
            return Response(f"bad key {secret} {'.' * 180} bad key {secret}".encode(), status=500)
        return says(f"I was asked with {secret}.\nPROCESS_SCORE: {number % 10}")

    with chat_server(judge) as server:
        run = make_run(tmp_path, *SETTINGS, f"coach.url={server.url}")
        env = {**os.environ, **KEYS, "HOME": str(tmp_path / "home")}
        (tmp_path / "home").mkdir()
        shown, seen = tmp_path / "shown", set()
        with shown.open("wb") as file:
            command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
            process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
            while process.poll() is None:
                seen.update(arguments())
                time.sleep(0.1)
        assert process.returncode == 0, shown.read_text()
        assert {value for sent in server.headers for value in sent.values() if "sk-" in value} == {
            f"Bearer {secret}"
        }
    secrets = [key.encode() for key in KEYS.values()]
    secrets.append((tmp_path / "home" / ".ray" / "auth_token").read_bytes().strip())
    monkeypatch.chdir(tmp_path)
    for words in (["ls", str(tmp_path)], ["show", str(run)], ["compare", str(run), str(run)]):
        done = CliRunner().invoke(app, words, env=KEYS)
        assert done.exit_code == 0, done.output
        seen.update((done.stdout_bytes, done.stderr_bytes))
        assert "demo_math" in done.stdout or words[0] == "compare"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "auth_token"]
    assert {"config.yaml", "metrics.jsonl", "mlflow.db", "ledger.sqlite", "shown"} <= {
        path.name for path in files
    }
    seen.update(path.read_bytes() for path in files)
    assert any(
        b"I was asked with [key]" in text for text in seen
    )  # what it said is there to be looked at
    assert any(b"ray" in text and b"raylet" in text for text in seen)
    assert not [
        text[:200] for text in seen for key in secrets if key[: SHOWN_KEY_CHARS + 7] in text
    ]


@pytest.mark.parametrize(
    "uri",
    ["http://me:tiger-1234@store:5000", "https://tiger-1234@store", "postgresql://me:tiger-1234@store/runs",
     "postgresql:///runs?user=me&password=tiger-1234", "https://store/?token=tiger-1234",
     "mssql+pyodbc:///?odbc_connect=SERVER%3Dstore%3BPWD%3Dtiger-1234"],
)  # fmt: skip
def test_a_store_with_a_password_in_its_address_is_refused_without_showing_it(
    tmp_path: Path, uri: str
) -> None:
    values = resolve(["experiment=demo_math"])
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({**values, "tracking": {**values["tracking"], "uri": uri}})
    )
    with pytest.raises(ConfigError, match=r"tracking\.uri: may hold no password") as refused:
        RunConfig.load(tmp_path / "config.yaml")
    assert "tiger" not in str(refused.value)


def test_a_store_without_a_password_in_its_address_is_not_refused(tmp_path: Path) -> None:
    values = resolve(["experiment=demo_math"])
    for uri in (
        "postgresql://me@store/runs?sslkey=/home/me/key",
        "sqlite:///a/b.db",
        "http://store:5000",
        "databricks",
    ):
        assert (
            RunConfig.check(
                {**values, "tracking": {**values["tracking"], "uri": uri}}, "here"
            ).tracking.uri
            == uri
        )


@pytest.mark.parametrize(
    "override",
    ["tracking.uri=http://me:tiger@store:x", "tracking.password=tiger", "coach.x=sk-tiger-0123", "x=://t:tiger@",
     "tracking={password: 'my tiger'}", "x=github_pat_tiger0123"],
)  # fmt: skip
def test_a_refusal_of_what_was_given_shows_no_password(override: str) -> None:
    for refuse in (
        lambda: resolve(["experiment=demo_math", override]),
        lambda: load_suite("demo_math", [override]),
    ):
        with pytest.raises((ConfigError, SuiteError)) as refused:
            refuse()
        assert "tiger" not in str(refused.value)
        assert "[redacted]" in str(refused.value)


def test_a_file_of_a_key_and_what_is_said_of_it_are_shown() -> None:
    for said in (
        "/home/me/hf_token: retriever needs it",
        "/run/secrets/my.password: no such file",
        "token_file=/a/b",
        "max_token=3",
        "token=[redacted]",
    ):
        assert redact_secrets(said) == said
