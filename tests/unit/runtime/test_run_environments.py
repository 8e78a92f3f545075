"""Environments of a run: its retriever, and the connections of its trajectories."""

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.run_environments import make_sidecar, open_environments
from retrieval.corpus import RetrievalError
from rollout.engines.remote import keys

VARIABLE = "RUN_TEST_KEY"


class NothingStartedError(Exception):
    """Raised in place of the start of the retriever."""


def make_config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={experiment}", *overrides]), "a test")


@contextmanager
def refusing_server(headers: list[str]) -> Iterator[str]:
    """Run an HTTP server that refuses all requests, and appends their token; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers.append(self.headers["Authorization"])
            self.send_error(400, "seen")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_servers_that_run_elsewhere_get_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    headers: list[str] = []
    with refusing_server(headers) as url:
        config = make_config(
            "demo_search", f"+retriever.urls=[{url}]", f"+retriever.key_file={token}"
        )
        with (
            open_environments(config, "unused") as make_env,
            pytest.raises(RetrievalError, match="400"),
        ):
            asyncio.run(make_env.keywords["retriever"].search("who?"))
    assert headers == ["Bearer 0123456789abcdef"]


def test_a_token_without_servers_is_refused(tmp_path: Path) -> None:
    message = "retriever: key_file is the token of servers that run elsewhere; set urls"
    with pytest.raises(ConfigError, match=message):
        make_config("demo_search", f"+retriever.key_file={tmp_path}/token")


def test_the_retriever_does_not_inherit_the_coachs_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key leaves the environment in every run of the config, and can be read later."""
    monkeypatch.setattr(keys, "_hidden_keys", {})
    monkeypatch.setenv(VARIABLE, "sk-0123456789abcdef")
    environment: dict[str, str] = {}

    def record_environment(sidecar: object) -> str:
        environment.update(os.environ)
        raise NothingStartedError

    monkeypatch.setattr("retrieval.sidecar.RetrieverSidecar.__enter__", record_environment)
    config = make_config(
        "demo_search", "coach=local", f"+coach.key_variable={VARIABLE}", "reward.name=coach"
    )
    with (
        pytest.raises(NothingStartedError),
        open_environments(config, "evaluation/base-retriever"),
    ):
        pass
    assert environment
    assert VARIABLE not in environment
    assert keys.read_key(VARIABLE, None).get_secret_value() == "sk-0123456789abcdef"


def test_a_search_may_wait_for_the_searches_of_all_trajectories_in_flight() -> None:
    config = make_config("drmas_t2_3b_separate_drmas")
    assert config.retriever is not None
    # measured: 71 searches a second over 1 M passages of 384 dimensions on 2 threads
    # These are 21 M passages of 768 dimensions on 32 threads.
    searches_per_s = 71 / (21 * 768 / 384) * 32 / 2
    longest_wait_s = config.trajectories_in_flight(8) / searches_per_s
    assert config.retriever.timeout_s > longest_wait_s
    command = make_sidecar(config.retriever, Path("index")).command
    assert float(command[command.index("--deadline-s") + 1]) > longest_wait_s


def test_servers_that_run_elsewhere_have_the_timeout_of_the_config() -> None:
    config = make_config(
        "demo_search", "+retriever.urls=[http://127.0.0.1:1]", "+retriever.timeout_s=77"
    )
    with open_environments(config, "unused") as make_env:
        assert make_env.keywords["retriever"].timeout_s == 77


def test_thousands_of_trajectories_can_have_a_connection_each() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, hard_limit = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard_limit))
    try:
        with open_environments(make_config("demo_math"), "unused"):
            soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert soft_limit >= min(hard_limit, 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
