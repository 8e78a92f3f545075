"""Traces of trajectories, read back from a real sqlite store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import mlflow
import pytest
from mlflow.entities import Trace

from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.mlflow_store import open_store
from mcore_mas.tracking.mlflow_training import (
    TrainingRecord,
    find_or_create_training_run,
    start_training_record,
)
from mcore_mas.tracking.traces import (
    TracedTrajectory,
    TraceSender,
    assessments,
    choose_trajectories,
)
from rollout.records.trajectory import (
    Group,
    Message,
    Status,
    Task,
    ToolEvent,
    Trajectory,
    VersionSpan,
)
from tests.support.mlflow_database import write_database
from tests.support.played import TASK, group, trajectory, turn
from tests.support.tracked_run import config_path_of, write_run

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
PATH_TASK = Task(
    id="p",
    prompt="S 1 1 G 1 3\nS . G",
    answers=("R R",),
    env="plan_path",
    source="s",
    split="train",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunConfig, TrainingRecord]]:
    folder = tmp_path_factory.mktemp("store")
    config = write_run(folder, write_database(folder / "mlflow.db"))
    yield config, start_training_record(config, config_path_of(config), 0)
    mlflow.set_tracking_uri(None)


def traced(*trajectories: Trajectory, task: Task = TASK) -> list[TracedTrajectory]:
    return [
        TracedTrajectory(trajectory=played, task=task, advantages={("0/t/0", "", 0): -1.25})
        for played in trajectories
    ]


def send(run: tuple[RunConfig, TrainingRecord], *items: TracedTrajectory) -> list[str]:
    """Send traces from a thread that ends; return its warnings."""
    warnings: list[str] = []
    sender = TraceSender(*run, warnings.append)
    sender.send(items)
    sender.close()
    sender.join(120)
    return warnings


def traces_of(run: tuple[RunConfig, TrainingRecord]) -> dict[str, Trace]:
    """Return the traces of the training's MLflow run, by trajectory."""
    store = open_store(run[0])
    run_id = find_or_create_training_run(store, *run).info.run_id
    traces = store.client.search_traces(locations=[store.experiment_id], run_id=run_id)
    return {trace.info.tags["trajectory"]: trace for trace in traces}


@pytest.mark.slow
def test_a_trajectory_is_a_trace_with_a_span_per_turn_and_tool_call(
    run: tuple[RunConfig, TrainingRecord],
) -> None:
    failed = trajectory(
        turn(0, started_s=BEGAN + 9, took_s=1.0),
        sample=1,
        outcome=None,
        status=Status.LATE,
        error="LateCall: gone",
    )
    assert send(run, *traced(PLAYED, failed)) == []
    traces = traces_of(run)
    assert sorted(traces) == ["0/t/0", "0/t/1"]

    root, *spans = sorted(
        traces["0/t/0"].data.spans,
        key=lambda span: (span.start_time_ns, span.parent_id is not None),
    )
    assert (root.name, root.parent_id) == ("s/t", None)
    assert (root.outputs["outcome"], root.outputs["answer"]) == (1.0, "3")
    assert [(span.name, span.span_type) for span in spans] == [
        ("solver", "CHAT_MODEL"),
        ("python", "TOOL"),
        ("verifier", "CHAT_MODEL"),
    ]
    assert {span.parent_id for span in spans} == {root.span_id}
    seconds = [ns / 1e9 - BEGAN for span in spans for ns in (span.start_time_ns, span.end_time_ns)]
    assert seconds == pytest.approx([0.0, 1.5, 2.0, 2.25, 3.0, 3.5], abs=1e-5)

    solver, tool, verifier = spans
    assert solver.inputs == {"messages": [{"role": "user", "content": "What is 1+2?"}]}
    assert solver.outputs == "\\boxed{3}"
    assert solver.attributes["reward"] == 0.9
    assert solver.attributes["advantage"] == -1.25
    assert solver.attributes["score.team"] == 1.0
    assert solver.attributes["agent"] == "solver"
    assert solver.attributes["tokens"] == 2
    assert solver.attributes["versions"] == [3, 4]
    assert "advantage" not in verifier.attributes
    assert verifier.attributes["masked"] is True
    assert (tool.inputs, tool.outputs) == ({"query": "1+2"}, "3")

    late = traces["0/t/1"]
    assert late.info.state == "ERROR"
    (late_root,) = [span for span in late.data.spans if span.parent_id is None]
    assert late_root.outputs["error"] == "LateCall: gone"


def feedback_of(trace: Trace) -> dict[str, object]:
    """Return the values of a trace's assessments by name."""
    return {entry.name: entry.value for entry in trace.info.assessments}


def test_a_trajectory_is_a_session_with_rewards_and_advantages_as_assessments(
    run: tuple[RunConfig, TrainingRecord],
) -> None:
    sent = [replace(PLAYED, id=f"5/t/{number}", step=5, sample=number) for number in (0, 1)]
    items = [
        TracedTrajectory(trajectory=sent[0], task=TASK, advantages={("5/t/0", "", 0): -1.25}),
        TracedTrajectory(
            trajectory=sent[1],
            task=TASK,
            advantages={("5/t/1", "", 0): 1.25, ("5/t/1", "", 1): 0.5},
        ),
    ]
    assert send(run, *items) == []
    traces = traces_of(run)
    first, second = traces["5/t/0"], traces["5/t/1"]
    assert feedback_of(first) == {"outcome": 1.0, "reward/solver": 0.9, "advantage/solver": -1.25}
    assert feedback_of(second) == {
        "outcome": 1.0,
        "reward/solver": 0.9,
        "advantage/solver": 1.25,
        "advantage/verifier": 0.5,
    }
    (source,) = {entry.source.source_type for entry in first.info.assessments}
    assert source == "CODE"

    store = open_store(run[0])
    run_id = find_or_create_training_run(store, *run).info.run_id
    sessions = [trace.info.trace_metadata["mlflow.trace.session"] for trace in (first, second)]
    assert sessions == [f"{run_id}/5/t/0", f"{run_id}/5/t/1"]
    session_traces = store.client.search_traces(
        locations=[store.experiment_id],
        filter_string=f"metadata.`mlflow.trace.session` = '{sessions[1]}'",
    )
    assert [trace.info.trace_id for trace in session_traces] == [second.info.trace_id]


def test_spans_have_the_attributes_of_opentelemetry(
    run: tuple[RunConfig, TrainingRecord],
) -> None:
    assert send(run, *traced(replace(PLAYED, id="6/t/0", step=6))) == []
    attributes = {
        span.name: {
            name.removeprefix("gen_ai."): value
            for name, value in span.attributes.items()
            if name.startswith("gen_ai.")
        }
        for span in traces_of(run)["6/t/0"].data.spans
    }
    conversation = attributes["s/t"].pop("conversation.id")
    assert conversation.endswith("/6/t/0")
    assert attributes == {
        "s/t": {"operation.name": "invoke_agent"},
        "solver": {
            "operation.name": "chat",
            "agent.name": "solver",
            "request.model": "p",
            "request.temperature": 1.0,
            "response.finish_reasons": ["stop"],
            "usage.input_tokens": 3,
            "usage.output_tokens": 2,
        },
        "python": {"operation.name": "execute_tool", "tool.name": "python"},
        "verifier": {
            "operation.name": "chat",
            "agent.name": "verifier",
            "request.model": "p",
            "request.temperature": 1.0,
            "response.finish_reasons": ["stop"],
            "usage.input_tokens": 1,
            "usage.output_tokens": 1,
        },
    }


def test_a_long_id_of_a_trajectory_does_not_cost_its_trace(
    run: tuple[RunConfig, TrainingRecord],
) -> None:
    long_id = f"9/{'x' * 300}/3"
    assert send(run, *traced(replace(PLAYED, id=long_id, step=9))) == []
    session = traces_of(run)[long_id].info.trace_metadata["mlflow.trace.session"]
    assert session.endswith(f"/{'x' * 198}/3")


def test_rewards_and_advantages_are_means_over_the_turns_of_an_agent() -> None:
    played = trajectory(
        turn(0, "solver", reward=1.0),
        turn(1, "verifier", reward=None),
        turn(2, "solver", reward=0.0),
        outcome=None,
    )
    feedback = assessments(played, {("0/t/0", "", 0): 2.0, ("0/t/0", "", 2): -1.0})
    values = {entry.name: entry.value for entry in feedback}
    assert values == {"reward/solver": 0.5, "advantage/solver": 0.5}


def test_a_trajectory_of_a_game_has_its_picture_among_the_artifacts(
    run: tuple[RunConfig, TrainingRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    walked = trajectory(
        turn(0, text="#### R", scores={"team": 0.0}),
        turn(1, text="#### R", round=1, scores={"team": 1.0}),
        id="7/path:1/0",
        step=7,
        task_id="p",
    )
    assert send(run, *traced(walked, task=PATH_TASK), *traced(replace(PLAYED, step=7))) == []
    assert list(tmp_path.iterdir()) == []  # no artifacts in the current folder
    store = open_store(run[0])
    run_id = find_or_create_training_run(store, *run).info.run_id
    (artifact,) = store.client.list_artifacts(run_id, "pictures/step_000007")
    assert artifact.path == "pictures/step_000007/7_path_1_0.svg"
    picture = Path(store.client.download_artifacts(run_id, artifact.path)).read_text()
    walker = [shape.get("x") for shape in ElementTree.fromstring(picture) if shape.text == "S"]
    # Three boards of three squares of 24 pixels, 16 apart: in each the walker is one square
    # further.
    assert walker == [str(16 + 12), str(16 + 72 + 16 + 24 + 12), str(16 + 2 * (72 + 16) + 48 + 12)]


def test_a_trace_that_is_refused_costs_one_line_and_no_other_trace(
    run: tuple[RunConfig, TrainingRecord],
) -> None:
    broken = replace(PLAYED, id="8/bad/0", turns=(None,))  # type: ignore[arg-type]
    warnings = send(run, *traced(broken, broken, replace(PLAYED, id="8/t/2")))
    assert len(warnings) == 1
    assert warnings[0].startswith("MLflow does not take the trace of 8/bad/0 (")
    assert warnings[0].endswith("traces are dropped until it works again")
    assert "8/t/2" in traces_of(run)


def test_a_database_that_fails_costs_one_line_without_text_of_models(
    run: tuple[RunConfig, TrainingRecord], capfd: pytest.CaptureFixture[str]
) -> None:
    open_store(run[0])
    text = "text of a model"
    refused = [
        trajectory(turn(0, text=text, started_s=BEGAN), sample=number) for number in (20, 21)
    ]
    database = sqlite3.connect(run[0].tracking.uri.removeprefix("sqlite:///"))
    database.execute("ALTER TABLE trace_info RENAME TO hidden")
    database.commit()
    capfd.readouterr()
    warnings = send(run, *traced(*refused))
    database.execute("ALTER TABLE hidden RENAME TO trace_info")
    database.commit()
    database.close()

    (warning,) = warnings
    assert warning.startswith("MLflow does not take the trace of 0/t/20 (TraceRefused: ")
    assert warning.endswith("no such table: trace_info); traces are dropped until it works again")
    output = capfd.readouterr()
    assert output.out + output.err == ""
    assert send(run, *traced(trajectory(turn(0), sample=23))) == []
    assert "0/t/23" in traces_of(run) and "0/t/21" not in traces_of(run)


def test_without_a_server_traces_are_dropped(tmp_path: Path) -> None:
    config = write_run(tmp_path, "http://127.0.0.1:1")
    record = start_training_record(config, config_path_of(config), 0)
    (warning,) = send((config, record), *traced(PLAYED, PLAYED))
    assert "Connection refused" in warning


def test_few_trajectories_are_chosen_from_many_tasks() -> None:
    groups = [
        group(*(trajectory(sample=sample, id=f"0/{name}/{sample}") for sample in range(size)))
        for name, size in (("x", 3), ("y", 1), ("z", 2))
    ]
    chosen = [played.id for played, _ in choose_trajectories(groups, 5)]
    assert chosen == ["0/x/0", "0/y/0", "0/z/0", "0/x/1", "0/z/1"]
    assert choose_trajectories(groups, 0) == choose_trajectories([], 3) == []
    (entry,) = choose_trajectories([Group(task=PATH_TASK, trajectories=(PLAYED,))], 2)
    assert entry == (PLAYED, PATH_TASK)
