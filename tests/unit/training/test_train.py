"""What a run does before its processes start."""

import asyncio
import os
import resource
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.run_environments import make_sidecar, open_environments
from mcore_mas.training.train import train
from retrieval.corpus import RetrievalError
from rollout.engines.remote import keys
from tests.support.run_folder import make_run

VARIABLE = "RUN_TEST_KEY"
COACHED = ["coach=local", f"+coach.key_variable={VARIABLE}", "reward.name=coach"]


class _NothingStarts(Exception):
    pass


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_hidden_keys", {})
    monkeypatch.setenv(VARIABLE, "sk-0123456789abcdef")


@pytest.mark.slow
def test_keys_leave_the_environment_before_the_first_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    @contextmanager
    def open_environments(config, log):  # starts the retriever, the first process of a run
        seen.update(os.environ)
        raise _NothingStarts
        yield

    monkeypatch.setattr("mcore_mas.training.train.open_environments", open_environments)
    run = make_run(tmp_path, *COACHED)
    with pytest.raises(_NothingStarts):
        train(run / "config.yaml")
    assert seen
    assert VARIABLE not in seen


def test_a_retriever_elsewhere_is_asked_with_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_error(400, "seen")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = [
            f"+retriever.urls=[http://127.0.0.1:{server.server_port}]",
            f"+retriever.key_file={token}",
        ]
        config = RunConfig.check(resolve(["experiment=demo_search", *url]), "a test")
        with (
            open_environments(config, "unused") as make_env,
            pytest.raises(RetrievalError, match="400"),
        ):
            asyncio.run(make_env.keywords["retriever"].search("who?"))
        server.shutdown()
    assert asked == ["Bearer 0123456789abcdef"]
    with pytest.raises(
        ConfigError,
        match="retriever: key_file is the token of servers that run elsewhere; set urls",
    ):
        resolve(["experiment=demo_search", url[1]])


def test_a_retriever_inherits_no_key_even_where_no_coach_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def start(sidecar: object) -> str:
        seen.update(os.environ)
        raise _NothingStarts

    monkeypatch.setattr("retrieval.sidecar.RetrieverSidecar.__enter__", start)
    config = RunConfig.check(resolve(["experiment=demo_search", *COACHED]), "a test")
    with pytest.raises(_NothingStarts), open_environments(config, "evaluation/base-retriever"):
        pass
    assert seen
    assert VARIABLE not in seen
    assert (
        keys.read_key(VARIABLE, None).get_secret_value() == "sk-0123456789abcdef"
    )  # kept for a later use


def test_a_search_may_wait_for_all_that_an_evaluation_plays() -> None:
    config = RunConfig.check(resolve(["experiment=drmas_t2_3b_separate_drmas"]), "a test")
    assert config.retriever is not None
    # 21 M passages of 768 dimensions on 32 threads; docs/retrieval.md has 71 a second of 1 M of 384 on two
    searches_per_s = 71 / (21 * 768 / 384) * 32 / 2
    longest_s = config.trajectories_in_flight(8) / searches_per_s
    assert config.retriever.timeout_s > longest_s
    options = make_sidecar(config.retriever, Path("index")).command
    assert float(options[options.index("--deadline-s") + 1]) > longest_s
    elsewhere = [
        "experiment=demo_search",
        "+retriever.urls=[http://127.0.0.1:1]",
        "+retriever.timeout_s=77",
    ]
    with open_environments(RunConfig.check(resolve(elsewhere), "a test"), "unused") as make_env:
        assert make_env.keywords["retriever"].timeout_s == 77


def test_thousands_of_trajectories_have_a_connection_each() -> None:
    before = _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        with open_environments(
            RunConfig.check(resolve(["experiment=demo_math"]), "a test"), "unused"
        ):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(most, 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
