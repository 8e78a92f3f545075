"""Errors are described in one line, as they were raised."""

from ray.exceptions import RayTaskError

from mcore_mas.runtime.error_description import describe_error
from rollout.records.files import RecordError


def test_the_projects_own_errors_are_described_without_their_type() -> None:
    assert describe_error(RecordError("a.parquet: no such file")) == "a.parquet: no such file"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(AssertionError()) == "AssertionError"


def test_an_error_in_a_ray_process_is_described_as_the_original_error() -> None:
    for error, description in [
        (ValueError("Invalid beta"), "ValueError: Invalid beta"),
        (RecordError("a: b"), "a: b"),
    ]:
        traceback = "\x1b[36mray::TrainerRank.join()\nTraceback"
        task_error = RayTaskError("TrainerRank.join", traceback, error, "rank", 1, "127.0.0.1")
        outer_error = RayTaskError("train", "Traceback", task_error, "train", 1, "127.0.0.1")
        assert describe_error(task_error) == description
        assert describe_error(task_error.as_instanceof_cause()) == description
        assert describe_error(outer_error) == description
