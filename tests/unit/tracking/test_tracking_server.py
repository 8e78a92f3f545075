"""A run's steps are in MLflow's real server once each, however the server fails in between."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from mcore_mas.tracking.feed import CLOCK
from tests.support.mlflow_server import STEPS, WANTED, Server, everything, idle, tracked, write


@pytest.mark.parametrize("fail", ["500", "late", "hang"])
def test_what_a_failing_server_did_not_confirm_is_there_once(
    tmp_path: Path, mlflow_server: Server, fail: str
) -> None:
    said: list[str] = []
    outlasted: list[bool] = []
    mlflow_server.start()
    mlflow_server.fail = fail  # from the first request that writes
    tracker = tracked(tmp_path, mlflow_server.uri, said)
    idle(tracker)
    for at in (1, 4):
        write(tmp_path / "train" / "metrics.jsonl", STEPS[at - 1 : at + 2])
        held = threading.Event()
        tracker.sink.put(lambda held=held: outlasted.append(held.wait(60)))
        tracker.log()  # a step waits for nothing
        held.set()
        idle(tracker)
        mlflow_server.fail, tracker._again = "", 0.0
        tracker.log()
        idle(tracker)
        mlflow_server.fail = fail
    write(tmp_path / "train" / "metrics.jsonl", STEPS[6:])
    mlflow_server.fail = ""
    assert tracker.finish("FINISHED"), said
    assert outlasted == [True, True]
    assert said[0].startswith("MLflow does not take metrics (") and "works again" in said[1]
    assert everything(mlflow_server.uri, tracker.run_id) == WANTED


def test_a_server_too_slow_for_all_steps_in_one_call_gets_them_one_by_one(
    tmp_path: Path, mlflow_server: Server
) -> None:
    said: list[str] = []
    mlflow_server.start()
    mlflow_server.fail = "slow"
    more = {
        f"agent/{number}": 1.0 for number in range(20)
    }  # of a step 0.8 s, of all seven twice the client's patience
    lines = [
        json.dumps({"step": step, "x": float(step), **more, CLOCK: 1e9 + step}) for step in STEPS
    ]
    write(tmp_path / "train" / "metrics.jsonl", ())
    (tmp_path / "train" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tracker = tracked(tmp_path, mlflow_server.uri, said)
    idle(tracker)
    assert tracker.finish("FINISHED"), said
    assert len(said) == 2 and "timed out" in said[0] and "works again" in said[1]
    assert everything(mlflow_server.uri, tracker.run_id) == WANTED


def test_a_server_that_refuses_and_comes_up_in_mid_run_gets_all(
    tmp_path: Path, mlflow_server: Server
) -> None:
    said: list[str] = []
    tracker = tracked(tmp_path, mlflow_server.uri, said)  # refused
    write(tmp_path / "train" / "metrics.jsonl", STEPS[:3])
    tracker.log()
    idle(tracker)
    assert tracker.run_id is None and "Connection refused" in said[0]
    mlflow_server.start()
    tracker._again = 0.0
    tracker.log()
    idle(tracker)
    mlflow_server.stop()  # and goes again
    write(tmp_path / "train" / "metrics.jsonl", STEPS[3:5])
    tracker._again = 0.0
    tracker.log()
    idle(tracker)
    mlflow_server.start()
    write(tmp_path / "train" / "metrics.jsonl", STEPS[5:])
    assert tracker.finish("FINISHED")
    assert everything(mlflow_server.uri, tracker.run_id) == WANTED


def test_what_a_run_could_not_send_another_process_sends(
    tmp_path: Path, mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    write(tmp_path / "train" / "metrics.jsonl", STEPS)
    assert not tracked(tmp_path, mlflow_server.uri, said, zeros=True).finish(
        "FINISHED"
    )  # refused until its end
    mlflow_server.start()
    other = tracked(tmp_path, mlflow_server.uri, said, first=6, ended=True)
    assert other.finish("FINISHED")
    assert everything(mlflow_server.uri, other.run_id) == WANTED
    (tmp_path / "train" / "mlflow.json").unlink()  # as if both had begun at once
    again = tracked(tmp_path, mlflow_server.uri, said, first=6, ended=True)
    assert again.finish("FINISHED")
    assert again.run_id == other.run_id
    assert everything(mlflow_server.uri, other.run_id) == WANTED


def test_a_resumed_run_goes_on_in_its_own_while_the_server_fails(
    tmp_path: Path, mlflow_server: Server
) -> None:
    said: list[str] = []
    mlflow_server.start()
    write(tmp_path / "train" / "metrics.jsonl", STEPS[:4])
    before = tracked(tmp_path, mlflow_server.uri, said)
    before.finish("KILLED")
    mlflow_server.fail = "late"
    after = tracked(
        tmp_path, mlflow_server.uri, said, id=before.run_id, first=2
    )  # step 2 is taken again
    idle(after)
    write(tmp_path / "train" / "metrics.jsonl", STEPS[4:])
    mlflow_server.fail = ""
    assert after.finish("FINISHED")
    assert after.run_id == before.run_id
    assert everything(mlflow_server.uri, before.run_id) == WANTED
