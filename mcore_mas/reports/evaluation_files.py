"""Scores in the files of evaluations, checked while they are read."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rollout.base.json_files import read_record
from rollout.base.ownership import FolderError

_Score = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class ScoreRow(BaseModel):
    """Mean of a metric over the tasks of one data source, or of all data sources.

    The row in the file also names the data source, which no reader needs.

    Attributes:
        metric: name of the metric, such as "avg@4".
        value: mean, as a fraction of 1.
    """

    metric: str
    value: _Score


class TaskScores(BaseModel):
    """Metrics of one task; empty if all replies to the task failed."""

    task_id: str
    metrics: dict[str, _Score]


_SCORE_ROWS = TypeAdapter(list[ScoreRow])
_TASK_SCORES = TypeAdapter(list[TaskScores])


def read_score_rows(evaluation: Path) -> list[ScoreRow]:
    """Read the means in the file of an evaluation; if it has several data sources, those over all come last.

    Raises:
        FolderError: the file is damaged.
    """
    return list(_read(evaluation, "rows", _SCORE_ROWS))


def read_task_metrics(evaluation: Path) -> dict[str, dict[str, float]]:
    """Read the metrics of each task of an evaluation, by the task's id.

    Raises:
        FolderError: the file is damaged.
    """
    tasks: list[TaskScores] = _read(evaluation, "tasks", _TASK_SCORES)
    return {task.task_id: task.metrics for task in tasks}


def _read(evaluation: Path, key: str, adapter: TypeAdapter[Any]) -> Any:
    """Read the value of a key in the file of an evaluation, and check it with `adapter`."""
    values = read_record(evaluation, key)[key]
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        key_path = ".".join(map(str, (key, *first_error["loc"])))
        raise FolderError(
            f"{evaluation}: damaged ({key_path}: {first_error['msg']}); "
            "remove it and have it made again"
        ) from None
