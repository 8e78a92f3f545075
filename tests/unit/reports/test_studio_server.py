"""The studio's server: who may ask, what is refused, and the page in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mcore_mas.reports.studio import Studio
from mcore_mas.reports.studio_server import studio_app
from rollout.records.files import write_trajectories
from tests.support.browser import browse, needs_chromium
from tests.support.played import failed, trajectory, turn
from tests.support.run_files import write_small_run
from tests.support.studio import serve_studio

TOKEN = "t" * 16
HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;owned\x07"
SCRIPTS = ["/vega.js", "/vega-embed.js", "/charts.js", "/studio.js"]
STEPS = [f"train/trajectories/step_00000{step}.parquet" for step in range(3)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Write a run with two steps of trajectories; return its results folder."""
    run = write_small_run(tmp_path / "a", {"t": 0.5})
    rewarded = [
        trajectory(turn(0, reward=number + 0.5), sample=number, task_id=f"t{number}")
        for number in range(3)
    ]
    write_trajectories(run / STEPS[0], rewarded)
    write_trajectories(
        run / STEPS[1], [failed(turn(0)), trajectory(turn(0), task_id="t7", answer=HOSTILE)]
    )
    return tmp_path


def ask(results: Path, path: str, **parameters: object) -> httpx.Response:
    app = studio_app(Studio(results), None)
    client = TestClient(app, base_url="http://127.0.0.1")
    response: httpx.Response = client.get(path, params=parameters)
    return response


def test_empty_fields_of_a_form_do_not_filter(results: Path) -> None:
    request = {"run": "a", "file": STEPS[0], "first": "0", "text": "", "agent": "", "high": ""}
    for low, indices in (("", [0, 1, 2]), ("1", [1, 2])):
        rows = ask(results, "/api/trajectories", **request, low=low).json()["rows"]
        assert [row["index"] for row in rows] == indices


def test_an_answer_has_no_control_characters_and_no_nan(results: Path) -> None:
    rows = ask(results, "/api/trajectories", run="a", file=STEPS[1]).json()["rows"]
    assert rows[1]["answer"] == r"<img src=x onerror=alert(1)>\x1b]0;owned\x07"
    with (results / "a" / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": NaN}\n')
    rows = ask(results, "/api/metrics", run="a").json()["rows"]
    assert rows[-1] == {"step": 2, "reward/mean": None}


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("/api/metrics", {"run": "../a"}, 404),
        ("/api/metrics", {"run": "a", "start": "-1"}, 400),
        ("/api/trajectories", {"run": "a", "file": "config.yaml"}, 404),
        ("/api/trajectories", {"run": "a", "file": STEPS[0], "low": "much"}, 400),
        ("/trajectory", {"run": "a", "file": STEPS[0], "index": "3"}, 404),
        ("/trajectory", {"run": "a", "file": STEPS[0], "index": "9" * 400}, 400),
        ("/config.yaml", {}, 404),
        ("/api/log", {"run": "x" * 5000}, 404),
        ("/api/compare", {"a": "a", "b": "x" * 5000}, 404),
        ("/api/trajectories", {"run": "a", "file": "x" * 5000}, 404),
        ("/" + "x" * 5000, {}, 404),
    ],
)
def test_a_wrong_request_is_refused(
    results: Path, path: str, parameters: dict[str, Any], status: int
) -> None:
    assert ask(results, path, **parameters).status_code == status


def test_a_damaged_file_is_one_line(results: Path) -> None:
    (results / "a" / STEPS[0]).write_bytes(b"PAR1" + b"x" * 100)
    response = ask(results, "/api/trajectories", run="a", file=STEPS[0])
    assert response.status_code == 404
    assert "not a readable parquet file" in response.text


def test_a_damaged_run_hides_no_other_run(results: Path) -> None:
    broken = write_small_run(results / "broken", {"t": 0.5})
    (broken / "config.yaml").write_text("a: [\n")
    (broken / "evaluation" / "tr\udcff.json").write_text('{"rows": []}')  # no UTF-8
    first, second = ask(results, "/api/runs").json()
    assert (first["run"], first["problems"]) == ("a", [])
    assert "config.yaml: not YAML" in second["problems"][0]
    response = ask(results, "/api/compare", a="a", b="broken")
    assert response.status_code == 404
    assert "config.yaml: not YAML" in response.text


def test_settings_that_json_lacks_are_compared(results: Path) -> None:
    other = write_small_run(results / "b", {"t": 0.5})
    with (other / "config.yaml").open("a") as file:
        file.write("when: 2020-01-02\nraw: !!binary /w==\nnames: !!set {x}\n")
    settings = ask(results, "/api/compare", a="a", b="b").json()["settings"]
    assert settings == {
        "when": [None, "2020-01-02"],
        "raw": [None, "_w=="],
        "names": [None, ["x"]],
    }


def test_without_a_token_only_this_machines_own_address_is_answered(results: Path) -> None:
    app = studio_app(Studio(results), None)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for host in ("127.0.0.1", "localhost:8001", "[::1]:8001"):
            assert client.get("/api/runs", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "127.0.0.1:8001@evil.example", "evil@127.0.0.1", ""):
            assert client.get("/api/runs", headers={"Host": host}).status_code == 403
        two_hosts = [("Host", "127.0.0.1"), ("Host", "evil.example")]
        assert client.get("/api/runs", headers=two_hosts).status_code == 403


def test_with_a_token_every_request_needs_it(results: Path) -> None:
    app = studio_app(Studio(results), TOKEN)
    with TestClient(app, base_url="http://node7") as client:
        assert client.get("/api/runs").status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/runs", headers=headers).status_code == 200
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        assert client.post("/api/runs", params={"token": TOKEN}).status_code == 405
        assert client.get("/studio.js").status_code == 401
        page = client.get("/", headers=headers).text
        scripts = re.findall(r'<script nonce="[^"]+" src="([^"]+)"', page)
        assert [path.partition("?")[0] for path in scripts] == SCRIPTS
        for script in scripts:
            assert client.get(script).status_code == 200


def test_pages_have_strict_security_policies(results: Path) -> None:
    policy = ask(results, "/").headers["content-security-policy"]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert (parts["default-src"], parts["connect-src"]) == ("'none'", "'self'")
    assert parts["script-src"].startswith("'nonce-")
    assert "unsafe" not in parts["script-src"]
    trajectory_policy = ask(results, "/trajectory", run="a", file=STEPS[0], index=0).headers[
        "content-security-policy"
    ]
    assert trajectory_policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_scripts_are_served_from_installed_packages(results: Path) -> None:
    for path in SCRIPTS:
        response = ask(results, path)
        assert response.headers["content-type"] == "text/javascript; charset=utf-8"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "http" not in re.sub(r"https?://(vega|www\.w3|127)", "", response.text) or (
            path.startswith("/vega")
        )
    assert ask(results, "/vega.js").headers["cache-control"] == "private, max-age=86400"
    assert ask(results, "/studio.js").headers["cache-control"] == "no-store"


class GrowingStudio(Studio):
    """A studio of a training: from the second request for metrics on, a step ends before each."""

    def __init__(self, results: Path, new_steps: int) -> None:
        super().__init__(results)
        self._path = results / "a" / "train" / "metrics.jsonl"
        self._new_steps = list(range(2, 2 + new_steps))
        self._is_first_request = True

    def metrics(self, run: str, start: int = 0) -> dict[str, Any]:
        if self._new_steps and not self._is_first_request:
            row = {"step": self._new_steps.pop(0), "reward/mean": 1.0}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self._is_first_request = False
        return super().metrics(run, start)


@needs_chromium
def test_a_browser_shows_curves_conversations_and_new_steps(results: Path, tmp_path: Path) -> None:
    with serve_studio(GrowingStudio(results, new_steps=3)) as url:
        page = browse(f"{url}/#a", tmp_path / "profile")
    assert "step 5 of 4" in page  # two at first, and three that ended since
    assert page.count("<figure>") == 2  # reward/mean and validation/accuracy
    assert '<tr tabindex="0" aria-current="true"><td>1</td><td><small>t · 1 turn</small>' in page
    assert ">failed: EngineError</small>" in page
    assert "step_000001" in page
    assert 'src="/trajectory?run=a&amp;file=train' in page
    assert "<img" not in page


@needs_chromium
def test_a_browser_needs_the_token(results: Path, tmp_path: Path) -> None:
    timed = [
        trajectory(turn(0, started_s=100.0, took_s=seconds), task_id=f"t{seconds}")
        for seconds in (1.0, 3.0)
    ]
    write_trajectories(results / "a" / STEPS[2], timed)
    with serve_studio(GrowingStudio(results, new_steps=2), TOKEN) as url:
        page = browse(f"{url}/?token={TOKEN}#a", tmp_path / "profile")
        refused = browse(f"{url}/#a", tmp_path / "other")
    assert "step 4 of 4" in page
    assert "The slowest trajectory was number 2, of task t3.0. It ended 1 s after half" in page
    assert "Trajectories by the agent or tool that works for them" in page
    assert "<span>done, waiting for the slowest</span><b>1</b>" in page
    assert page.count("<figure>") == 3  # those of the metrics, and the timeline
    assert f"index=0&amp;token={TOKEN}" in page  # the conversation's frame sends it too
    assert "a bearer token is required" in refused and "<script" not in refused
