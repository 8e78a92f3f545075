"""Traces, read back from a real sqlite store."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from mcore_mas.tracking.traces import Traces, chosen
from rollout.records.trajectory import Message, Status, ToolEvent, VersionSpan
from tests.support.played import group, trajectory, turn
from tests.support.trackable import opened_tracker

BEGAN = 1_700_000_000.0
PLAYED = trajectory(
    turn(
        0,
        "solver",
        {"team": 1.0},
        messages=(Message(role="user", content="What is 1+2?"),),
        text="\\boxed{3}",
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-0.5, -0.25),
        versions=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
        reward=0.9,
        started_s=BEGAN,
        took_s=1.5,
    ),
    turn(1, "verifier", text="APPROVE", masked=True, started_s=BEGAN + 3, took_s=0.5),
    tools=(
        ToolEvent(
            after_turn=0, tool="python", query="1+2", result="3", started_s=BEGAN + 2, took_s=0.25
        ),
    ),
    answer="3",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A tracking URI, and a run there."""
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    (folder / "train").mkdir()
    (folder / "train" / "metrics.jsonl").touch()
    tracker = opened_tracker(folder, uri, pytest.fail)
    yield uri, tracker
    tracker.finish("FINISHED")
    mlflow.set_tracking_uri(None)


def done(tracker):
    """Wait for what waits."""
    ready = threading.Event()
    tracker.sink.put(ready.set)
    assert ready.wait(60)


def read_back(store, played, advantages):
    warnings: list[str] = []
    uri, tracker = store
    traces = Traces(tracker, warnings.append)
    client = MlflowClient(tracking_uri=uri)
    done(tracker)  # the run and its experiment are there
    held = threading.Event()
    tracker.sink.put(lambda: held.wait(60))
    traces.send(played, advantages)  # a step does not wait for the store
    where: Any = {"locations": [tracker.store.experiment_id], "run_id": tracker.run_id}
    assert not client.search_traces(**where)
    held.set()
    done(tracker)
    assert warnings == []
    return client.search_traces(**where)


def test_a_trajectory_is_a_trace_of_its_run_with_a_span_per_turn_and_tool(store):
    failed = trajectory(
        turn(0, started_s=BEGAN + 9, took_s=1.0),
        sample=1,
        outcome=None,
        status=Status.LATE,
        error="LateCall: gone",
    )
    found = read_back(store, [PLAYED, failed], {("0/t/0", "", 0): -1.25})
    by_id = {trace.info.tags["trajectory"]: trace for trace in found}
    assert sorted(by_id) == ["0/t/0", "0/t/1"]
    trace = by_id["0/t/0"]
    root, *spans = sorted(
        trace.data.spans, key=lambda span: (span.start_time_ns, span.parent_id is not None)
    )
    assert (root.name, root.parent_id, root.outputs["outcome"], root.outputs["answer"]) == (
        "s/t",
        None,
        1.0,
        "3",
    )
    assert [(s.name, s.span_type, s.parent_id == root.span_id) for s in spans] == [
        ("solver", "CHAT_MODEL", True),
        ("python", "TOOL", True),
        ("verifier", "CHAT_MODEL", True),
    ]
    seconds = [ns / 1e9 - BEGAN for span in spans for ns in (span.start_time_ns, span.end_time_ns)]
    assert seconds == pytest.approx([0.0, 1.5, 2.0, 2.25, 3.0, 3.5], abs=1e-5)
    solver, tool, verifier = spans
    assert solver.inputs == {"messages": [{"role": "user", "content": "What is 1+2?"}]}
    assert solver.outputs == "\\boxed{3}"
    attributes = solver.attributes
    assert (attributes["reward"], attributes["advantage"], attributes["score.team"]) == (
        0.9,
        -1.25,
        1.0,
    )
    assert (attributes["agent"], attributes["tokens"], attributes["versions"]) == (
        "solver",
        2,
        [3, 4],
    )
    assert "advantage" not in verifier.attributes and verifier.attributes["masked"] is True
    assert (tool.inputs, tool.outputs) == ({"query": "1+2"}, "3")
    late = by_id["0/t/1"]
    assert late.info.state == "ERROR"
    assert (
        next(s for s in late.data.spans if s.parent_id is None).outputs["error"] == "LateCall: gone"
    )


def test_a_trajectory_with_a_picture_has_it_among_the_runs_artifacts(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri, tracker = store
    warnings: list[str] = []
    traces = Traces(tracker, warnings.append)
    drawn = replace(PLAYED, id="7/path:1/0", step=7)
    traces.send([drawn, PLAYED], {}, lambda played: "<svg/>" if played.step == 7 else None)
    done(tracker)
    assert warnings == []
    assert list(tmp_path.iterdir()) == []  # nothing where the process happens to be
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.list_artifacts(tracker.run_id, "pictures/step_000007")
    assert found.path == "pictures/step_000007/7_path_1_0.svg"
    assert Path(client.download_artifacts(tracker.run_id, found.path)).read_text() == "<svg/>"


def test_a_store_that_refuses_costs_one_warning_and_has_all_once_it_works(store):
    uri, tracker = store
    warnings: list[str] = []
    done(tracker)
    there = SimpleNamespace(uri=uri, experiment_id="12345")
    elsewhere: Any = SimpleNamespace(store=there, run_id=tracker.run_id, sink=tracker.sink)
    traces = Traces(elsewhere, warnings.append)
    traces.send([PLAYED, replace(PLAYED, id="0/t/5"), replace(PLAYED, id="0/t/6")], {})
    done(tracker)
    assert len(warnings) == 1
    assert warnings[0].startswith("MLflow does not take the trace of 0/t/0 (")
    there.experiment_id = tracker.store.experiment_id
    traces.send([replace(PLAYED, id="1/t/0")], {})
    done(tracker)
    assert len(warnings) == 1
    client = MlflowClient(tracking_uri=uri)
    found = client.search_traces(locations=[tracker.store.experiment_id], run_id=tracker.run_id)
    sent = {trace.info.tags["trajectory"] for trace in found}
    assert sent >= {"0/t/5", "0/t/6", "1/t/0"}


def test_a_trace_that_is_never_taken_holds_up_no_other(store, monkeypatch):
    uri, tracker = store
    warnings: list[str] = []
    traces = Traces(tracker, warnings.append)

    def draw(played):
        if played.id == "8/bad/0":
            raise ValueError("no picture")

    traces.send([replace(PLAYED, id="8/bad/0"), replace(PLAYED, id="8/t/1")], {}, draw)
    for _ in range(2):
        traces.send([], {})
    traces.send([replace(PLAYED, id="8/t/2")], {})
    done(tracker)
    assert warnings == [
        "MLflow does not take the trace of 8/bad/0 (ValueError: no picture); traces wait for the next"
    ]
    client = MlflowClient(tracking_uri=uri)
    found = client.search_traces(locations=[tracker.store.experiment_id], run_id=tracker.run_id)
    assert {trace.info.tags["trajectory"] for trace in found} >= {"8/t/1", "8/t/2"}


def test_few_are_chosen_from_many_tasks():
    groups = [
        group(*(trajectory(sample=sample, id=f"0/{task}/{sample}") for sample in range(size)))
        for task, size in (("x", 3), ("y", 1), ("z", 2))
    ]
    assert [t.id for t in chosen(groups, 5)] == ["0/x/0", "0/y/0", "0/z/0", "0/x/1", "0/z/1"]
    assert chosen(groups, 0) == chosen([], 3) == []
