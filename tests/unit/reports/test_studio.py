"""The studio: what it lists, reads and shows, live; and that nothing else can be read or run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow.parquet as pq
import pytest
import uvicorn
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mcore_mas.reports.studio import Studio, studio_app
from rollout.base.http_server import listener_url, open_listener, server_config
from rollout.records.files import (
    RecordError,
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    trajectory_at,
    write_trajectories,
)
from rollout.records.trajectory import ToolEvent
from tests.support.browser import browse, needs_chromium
from tests.support.played import failed, trajectory, turn
from tests.unit.reports.test_runs import make_run

TOKEN = "t" * 16
HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;owned\x07"


def played(number: int, **fields: object):
    """Of task `t<number>`, two turns whose rewards are number and number + 1."""
    turns = (
        replace(turn(0), reward=float(number)),
        replace(
            turn(1, "verifier"),
            reward=number + 1.0,
            text="a b",
            completion_ids=(0, 1),
            logprobs=(-0.5, -3.0),
        ),
    )
    return trajectory(*turns, sample=number, task_id=f"t{number}", **fields)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs, the first with two steps of trajectories and the tokenizer of its policy."""
    make_run(tmp_path / "a", {"t": 0.5})
    make_run(tmp_path / "b", {"t": 1.0}, seed=2)
    folder = tmp_path / "a" / "train"
    write_trajectories(
        folder / "trajectories" / "step_000000.parquet", [played(n) for n in range(3)]
    )
    write_trajectories(
        folder / "trajectories" / "step_000001.parquet",
        [failed(turn(0)), played(7, answer=HOSTILE)],
    )
    return tmp_path


def ask(results: Path, path: str, **query: object):
    return TestClient(studio_app(Studio(results), None), base_url="http://127.0.0.1").get(
        path, params=query
    )


def test_a_list_has_agents_and_mean_rewards_and_is_filtered(results: Path) -> None:
    file = results / "a" / "train" / "trajectories" / "step_000000.parquet"
    rows = list_trajectories(file, TrajectoryFilter())
    assert [(row.index, row.task_id, row.turns, row.agents, row.reward) for row in rows] == [
        (n, f"t{n}", 2, ("solver", "verifier"), n + 0.5) for n in range(3)
    ]
    assert [row.index for row in list_trajectories(file, TrajectoryFilter(low=1.0))] == [1, 2]
    assert [row.index for row in list_trajectories(file, TrajectoryFilter(high=1.5))] == [0, 1]
    assert [row.index for row in list_trajectories(file, TrajectoryFilter(text="T2"))] == [2]
    assert list_trajectories(file, TrajectoryFilter(agent="coder")) == []
    assert list_trajectories(file, TrajectoryFilter(status="failed")) == []
    assert [row.index for row in list_trajectories(file, TrajectoryFilter(), first=1, limit=1)] == [
        1
    ]
    assert count_trajectories(file) == 3


def test_only_the_rows_of_a_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "many.parquet"
    write_trajectories(file, [played(n) for n in range(600)])  # in groups of 256 rows
    asked: list[tuple[int, bool]] = []
    read = pq.ParquetFile.iter_batches

    def watched(
        self: pq.ParquetFile, rows: int, *, columns: list[str] | None, row_groups: list[int]
    ):
        asked.extend((group, columns is None) for group in row_groups)
        return read(self, rows, columns=columns, row_groups=row_groups)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    assert [
        row.index for row in list_trajectories(file, TrajectoryFilter(), first=300, limit=2)
    ] == [300, 301]
    assert trajectory_at(file, 599).task_id == "t599"
    assert asked == [
        (1, False),
        (2, True),
    ]  # of a list without texts and tokens, of one trajectory its own group
    with pytest.raises(RecordError, match="no trajectory 600; it holds 600"):
        trajectory_at(file, 600)


def test_who_waits_for_whom_is_counted_moment_by_moment(results: Path) -> None:
    """Of two trajectories: a solver for 6 s, then a tool for 2 s, then a verifier for 4 s; and a solver for 3 s."""
    turns = (
        replace(turn(0), started_s=100.0, took_s=6.0),
        replace(turn(1, "verifier"), started_s=108.0, took_s=4.0),
    )
    tool = ToolEvent(
        after_turn=0, tool="search", query="q", result="r", started_s=106.0, took_s=2.0
    )
    long = replace(trajectory(*turns, task_id="long"), tools=(tool,))
    short = trajectory(replace(turn(0), started_s=100.0, took_s=3.0), task_id="short")
    write_trajectories(
        results / "a" / "train" / "trajectories" / "step_000002.parquet", [short, long]
    )
    asked = {"run": "a", "file": "train/trajectories/step_000002.parquet"}
    found = ask(results, "/api/waits", **asked).json()
    assert (found["seconds"], found["slowest"], found["task"], found["behind"]) == (
        12.0,
        1,
        "long",
        4.5,
    )
    at = {who: dict(map(tuple, points)) for who, points in found["lines"].items()}
    moments = [1.1, 4.1, 7.1, 10.1]  # of 60 that last 0.2 s each
    assert [
        [round(own[min(own, key=lambda t: abs(t - m))], 6) for m in moments] for own in at.values()
    ] == [
        [2, 1, 0, 0],  # the solver
        [0, 0, 0, 1],  # the verifier
        [0, 0, 1, 0],  # the tool
        [0, 1, 1, 1],  # who is done and waits
    ]
    assert list(at) == ["solver", "verifier", "tool search", "done, waiting for the slowest"]
    asked["file"] = "train/trajectories/step_000001.parquet"  # without times
    assert ask(results, "/api/waits", **asked).json() == {}


def test_runs_files_and_a_log(results: Path) -> None:
    runs = ask(results, "/api/runs").json()
    assert [(one["run"], one["steps"], one["of"], one["reward"]) for one in runs] == [
        ("a", 2, 4, 0.75),
        ("b", 2, 4, 0.75),
    ]
    assert ask(results, "/api/files", run="a").json() == [
        f"train/trajectories/step_00000{n}.parquet" for n in (0, 1)
    ]
    (results / "a" / "logs").mkdir()
    (results / "a" / "logs" / "train.log").write_text("x" * 30_000 + HOSTILE)
    assert ask(results, "/api/log", run="a").json() == "x" * (
        20_000 - len(HOSTILE)
    ) + HOSTILE.replace("\x1b", "\\x1b").replace("\x07", "\\x07")
    found = ask(results, "/api/compare", a="a", b="b").json()
    assert found["settings"] == {"seed": [1, 2]}
    assert (found["scores"][0]["first"], found["scores"][0]["second"]) == (0.5, 1.0)


def test_fields_that_are_left_empty_let_all_through(results: Path) -> None:
    asked = {"run": "a", "file": "train/trajectories/step_000000.parquet", "first": "0"}
    fields = {"text": "", "agent": "", "status": "", "high": ""}
    for low, shown in (("", [0, 1, 2]), ("1", [1, 2])):
        rows = ask(results, "/api/trajectories", **asked, **fields, low=low).json()["rows"]
        assert [row["index"] for row in rows] == shown


def test_what_a_model_wrote_is_harmless_in_a_list_too(results: Path) -> None:
    file = results / "a" / "train" / "trajectories" / "step_000001.parquet"
    write_trajectories(
        file,
        [replace(failed(turn(0)), error="\x1b[2J\u202e"), played(7, answer=f"{HOSTILE}\u2066")],
    )
    rows = ask(
        results, "/api/trajectories", run="a", file="train/trajectories/step_000001.parquet"
    ).json()["rows"]
    assert rows[0]["error"] == r"\x1b[2J\u202e"
    assert rows[1]["answer"] == r"<img src=x onerror=alert(1)>\x1b]0;owned\x07\u2066"


def test_a_step_that_ends_is_in_the_next_answer(results: Path) -> None:
    before = ask(results, "/api/metrics", run="a", start=0).json()
    assert [row["step"] for row in before["rows"]] == [-1, 0, 1]
    with (results / "a" / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": NaN}\n{"step": 3, "rew')
    after = ask(results, "/api/metrics", run="a", start=before["end"]).json()
    assert after["rows"] == [
        {"step": 2, "reward/mean": None}
    ]  # JSON has no NaN, and a line may be half written


def test_tokens_are_shaded_by_their_log_probability(results: Path) -> None:
    tokenizer = results / "a" / "train" / "models" / "p" / "tokenizer.json"
    file = {"run": "a", "file": "train/trajectories/step_000000.parquet", "index": 1}
    assert (
        "a b</pre>" in ask(results, "/trajectory", **file).text
    )  # without a tokenizer, the turn's text
    tokenizer.parent.mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0, "<b>": 1, "?": 2}, unk_token="?")).save(str(tokenizer))
    page = ask(results, "/trajectory", **file).text
    assert '<span style="--odd:6%" title="p 0.607">a</span>' in page  # 12 % for a nat
    assert '<span style="--odd:36%" title="p 0.050"> &lt;b&gt;</span></pre>' in page


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/api/metrics", {"run": "../a"}, 404),
        ("/api/metrics", {"run": ".."}, 404),
        ("/api/metrics", {"run": "a", "start": "-1"}, 400),
        ("/api/trajectories", {"run": "a", "file": "../../etc/passwd"}, 404),
        ("/api/trajectories", {"run": "a", "file": "config.yaml"}, 404),
        (
            "/api/trajectories",
            {"run": "a", "file": "train/trajectories/step_000000.parquet", "low": "much"},
            400,
        ),
        (
            "/trajectory",
            {"run": "a", "file": "train/trajectories/step_000000.parquet", "index": "3"},
            404,
        ),
        (
            "/trajectory",
            {"run": "a", "file": "train/trajectories/step_000000.parquet", "index": "9" * 400},
            400,
        ),
        ("/config.yaml", {}, 404),
    ],
)
def test_what_is_not_a_run_or_its_file_is_not_there(
    results: Path, path: str, query: dict, status: int
) -> None:
    assert ask(results, path, **query).status_code == status


def test_a_damaged_file_is_one_line(results: Path) -> None:
    file = results / "a" / "train" / "trajectories" / "step_000000.parquet"
    file.write_bytes(b"PAR1" + b"x" * 100)
    answer = ask(
        results, "/api/trajectories", run="a", file="train/trajectories/step_000000.parquet"
    )
    assert answer.status_code == 404 and "not a readable parquet file" in answer.text


def test_only_this_machine_asks_unless_it_has_the_token(results: Path) -> None:
    with TestClient(studio_app(Studio(results), None), base_url="http://evil.example") as led_here:
        assert led_here.get("/api/runs").status_code == 403
    with TestClient(studio_app(Studio(results), "t" * 16), base_url="http://node7") as client:
        assert client.get("/api/runs").status_code == 401
        assert (
            client.get("/api/runs", headers={"Authorization": f"Bearer {'t' * 16}"}).status_code
            == 200
        )
        assert client.get("/", params={"token": "t" * 16}).status_code == 200
        assert client.post("/api/runs", params={"token": "t" * 16}).status_code == 405
        policy = client.get("/", params={"token": "t" * 16}).headers["content-security-policy"]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert (parts["default-src"], parts["connect-src"]) == ("'none'", "'self'")
    assert parts["script-src"].startswith("'nonce-") and "unsafe" not in parts["script-src"]


class Answering:
    """A studio on a free port, for the block; `steps` further steps end while a browser looks."""

    def __init__(self, results: Path, steps: int, token: str | None = None) -> None:
        self._journal, self._steps = results / "a" / "train" / "metrics.jsonl", steps
        self._listener = open_listener("127.0.0.1", 0)
        self.url = listener_url(self._listener)
        metrics, self._asked = Studio.metrics, 0

        def growing(studio: Studio, run: str, start: int):
            self._asked += 1
            if self._asked > 1 and self._steps:
                self._steps -= 1
                with self._journal.open("a") as file:
                    file.write(
                        json.dumps({"step": 1 + steps - self._steps, "reward/mean": 1.0}) + "\n"
                    )
            return metrics(studio, run, start)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Studio, "metrics", growing)
        app = studio_app(Studio(results), token)
        self._server = uvicorn.Server(server_config(app, drain_s=1, lifespan=False))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._patch.undo()


@pytest.fixture
def answering(results: Path) -> Iterator[Answering]:
    with Answering(results, steps=3) as studio:
        yield studio


@needs_chromium
def test_a_browser_shows_curves_conversations_and_new_steps(
    answering: Answering, tmp_path: Path
) -> None:
    page = browse(f"{answering.url}/#a", tmp_path / "profile")
    assert "5 steps, 6 rows of metrics" in page  # 2 at first, and three that ended since
    assert page.count("<polyline") == 2  # reward/mean and validation/accuracy
    assert '<tr class="row" aria-current="true"><td>0</td><td>t</td><td>solver (1)</td>' in page
    assert ">failed: EngineError</td>" in page
    assert "step_000001" in page and 'src="/trajectory?run=a&amp;file=train' in page
    assert "<img" not in page


@needs_chromium
def test_a_browser_with_the_token_shows_conversations_and_who_waits_and_without_it_nothing(
    results: Path, tmp_path: Path
) -> None:
    timed = [
        trajectory(replace(turn(0), started_s=100.0, took_s=n), task_id=f"t{n}") for n in (1.0, 3.0)
    ]
    write_trajectories(results / "a" / "train" / "trajectories" / "step_000002.parquet", timed)
    with Answering(results, steps=2, token=TOKEN) as studio:
        page = browse(f"{studio.url}/?token={TOKEN}#a", tmp_path / "profile")
        refused = browse(f"{studio.url}/#a", tmp_path / "other")
    assert "4 steps, 5 rows of metrics" in page
    assert "the slowest trajectory was #1, of t3.0: half were done 1 s before it" in page
    assert (
        "trajectories by who works for them, in 3 s" in page
        and "done, waiting for the slowest 1" in page
    )
    assert f"index=0&amp;token={TOKEN}" in page  # the conversation's frame asks with it too
    assert "a bearer token is required" in refused and "<script" not in refused
