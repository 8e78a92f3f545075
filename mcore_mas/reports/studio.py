"""Data of the studio: runs, metrics, trajectories and logs of a results folder, read on demand."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.reports.metric_titles import metric_chart
from mcore_mas.reports.run_differences import config_differences, score_differences
from mcore_mas.reports.run_states import read_run_config, read_run_states
from mcore_mas.reports.step_metrics import has_step
from mcore_mas.reports.task_texts import TaskText, read_task_texts
from mcore_mas.reports.trajectory_page import (
    TurnGroups,
    TurnTokens,
    trajectory_page,
)
from mcore_mas.reports.turn_credit import compute_turn_credit
from mcore_mas.reports.work_timeline import work_timeline
from rollout.base.json_files import read_json_lines
from rollout.base.ownership import FolderError
from rollout.base.text import escape_text
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Trajectory
from rollout.records.trajectory_lists import (
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    trajectory_at,
)

_ROWS_PER_PAGE = 100  # of a list of trajectories
_LOG_BYTES = 20_000  # number of bytes that are shown of the end of a log
_MAX_CONFIG_BYTES = 2_000_000  # number of bytes that are shown of the beginning of a config
# A list shows the beginnings of questions and answers; the page of a trajectory has all of them.
_MAX_QUESTION_LETTERS = 300
_MAX_ANSWER_LETTERS = 100
_MAX_ANSWERS = 3
_NOT_METRICS = {"step", "time/unix_s"}  # keys of a row that have no chart
_MAX_TRAJECTORIES = 4096  # credit and timeline of larger files are not computed
_FILTER = TypeAdapter(TrajectoryFilter)

WholeNumber = Annotated[int, Field(ge=0, lt=10**15)]


class Studio:
    """Answers to the requests of the studio's page.

    Each method answers one kind of request; its parameters are those of the request, checked by
    their types. A run is named by its folder in the results folder, and a file of trajectories by
    its path in the run's folder, as `files` lists it. A request can name no other file.
    """

    def __init__(self, results: Path) -> None:
        """Serve the runs of a results folder."""
        self._results = results

    def runs(self) -> list[dict[str, Any]]:
        """Return the state of every run."""
        return [asdict(state) for state in read_run_states(self._results)]

    def metrics(self, run: str, start: WholeNumber = 0) -> dict[str, Any]:
        """Return the steps' rows of metrics.jsonl from byte `start` on.

        Returns:
            rows: one object per step.
            charts: the chart of each metric of the rows.
            start: first byte that was read. It is 0 if the file is shorter than the requested
                start, because a training that resumed has dropped the steps after its checkpoint.
            end: byte to read from the next time.
        """
        folder = self._run_folder(run)
        path = folder / "train" / "metrics.jsonl"
        rows: list[dict[str, Any]] = []
        end = 0
        if path.is_file() and _is_inside(path, folder):
            if start > path.stat().st_size:
                start = 0
            rows, end = read_json_lines(path, start)
        rows = [row for row in rows if has_step(row)]
        charts: dict[str, dict[str, Any]] = {}
        for row in rows:
            for name in row:
                if name not in charts and name not in _NOT_METRICS:
                    charts[name] = asdict(metric_chart(name))
        return {"rows": rows, "charts": charts, "start": start, "end": end}

    def agents(self, run: str) -> list[str]:
        """Return the agents of a run in the order of its config, which decides their colours.

        Raises:
            FolderError: the config is damaged.
        """
        agents = read_run_config(self._run_folder(run)).get("agents")
        return list(map(str, agents)) if isinstance(agents, Mapping) else []

    def config(self, run: str) -> str:
        """Return the resolved config of a run as YAML; only its beginning if it is very large."""
        with (self._run_folder(run) / "config.yaml").open("rb") as file:
            return escape_text(file.read(_MAX_CONFIG_BYTES).decode("utf-8", errors="replace"))

    def files(self, run: str) -> list[str]:
        """Return a run's files of trajectories, those of training steps first."""
        folder = self._run_folder(run)
        paths = [
            *sorted(folder.glob("train/trajectories/*.parquet")),
            *sorted(folder.glob("evaluation/*/*.parquet")),
        ]
        return [path.relative_to(folder).as_posix() for path in paths if _is_inside(path, folder)]

    def trajectories(
        self, run: str, file: str, first: WholeNumber = 0, **filters: str
    ) -> dict[str, Any]:
        """Return a page of the list of a file's trajectories.

        Args:
            run: name of the run.
            file: file of the run.
            first: index of the trajectory in the file at which the page begins, counted from 0.
            filters: fields of `TrajectoryFilter`.

        Returns:
            rows: the next trajectories that pass the filters, each with its task's question and
                right answers.
            total: number of trajectories in the file.
            rows_per_page: maximum number of rows on a page.
        """
        path = self._file_path(run, file)
        rows = list_trajectories(
            path, _FILTER.validate_python(filters), first=first, limit=_ROWS_PER_PAGE
        )
        texts = self._task_texts(run, {row.task_id for row in rows})
        return {
            "rows": [_with_task_text(asdict(row), texts.get(row.task_id)) for row in rows],
            "total": count_trajectories(path),
            "rows_per_page": _ROWS_PER_PAGE,
        }

    def trajectory(self, run: str, file: str, index: WholeNumber) -> str:
        """Return the page of one trajectory, with tokens and credit if they can be computed."""
        path = self._file_path(run, file)
        trajectory = trajectory_at(path, index)
        advantages, groups = _compute_credit(path, path.stat().st_mtime_ns)
        task = self._task_texts(run, [trajectory.task_id]).get(trajectory.task_id)
        return trajectory_page(
            trajectory,
            advantages,
            self._tokens(run, trajectory),
            groups,
            task=task,
            agent_order=self._agent_order(run),
        )

    def timeline(self, run: str, file: str) -> dict[str, Any]:
        """Return the timeline of a file's trajectories; {} if the file is large or has no times."""
        path = self._file_path(run, file)
        if count_trajectories(path) > _MAX_TRAJECTORIES:
            return {}
        timeline = work_timeline(read_trajectories(path))
        return {} if timeline is None else asdict(timeline)

    def log(self, run: str) -> str:
        """Return the last bytes of the training's log; "" if there is no log.

        A log that is a link to a file outside of the run's folder is not read. A message about it is
        returned instead.
        """
        folder = self._run_folder(run)
        path = folder / "logs" / "train.log"
        if not path.is_file():
            return ""
        if not _is_inside(path, folder):
            return f"{path} is a link to a file outside of the run's folder, and not shown"
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return escape_text(file.read().decode("utf-8", errors="replace"))

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences between two runs in settings and scores."""
        first = self._run_folder(a)
        second = self._run_folder(b)
        scores = [asdict(row) for row in score_differences(first, second)]
        return {"settings": config_differences(first, second), "scores": scores}

    def _run_folder(self, name: str) -> Path:
        # The name comes from the request, so it is compared with the names in the folder first.
        folders = {folder.name: folder for folder in self._results.iterdir()}
        if name not in folders:
            raise HTTPException(404, f"no run '{name[:80]}' in {self._results}")
        folder = folders[name]
        config = folder / "config.yaml"
        if not config.is_file() or not _is_inside(config, folder):
            raise HTTPException(404, f"no run '{name[:80]}' in {self._results}: it has no config")
        return folder

    def _file_path(self, run: str, name: str) -> Path:
        if name not in self.files(run):
            raise HTTPException(404, f"run '{run}' has no file of trajectories '{name[:80]}'")
        return self._run_folder(run) / name

    def _task_texts(self, run: str, task_ids: Collection[str]) -> dict[str, TaskText]:
        """Return the texts of tasks of a run; links that leave the runs' folders are not followed."""
        folder = self._run_folder(run)
        # The pipeline may link a run's tasks to those of another run of the suite.
        task_folders = {run_folder.resolve() / "tasks" for run_folder in self._results.iterdir()}
        paths = [
            path
            for path in sorted((folder / "tasks").glob("*.parquet"))
            if _is_inside(path, folder) or path.resolve().parent in task_folders
        ]
        return read_task_texts(paths, task_ids)

    def _agent_order(self, run: str) -> list[str]:
        """Return `agents`, or [] if the config is damaged."""
        with suppress(FolderError):
            return self.agents(run)
        return []

    def _tokens(self, run: str, trajectory: Trajectory) -> TurnTokens:
        """Return the sampled tokens of the turns of a trajectory.

        Turns of a policy whose tokenizer is not on this machine are left out.
        """
        folder = self._run_folder(run)
        policies = {turn.policy for turn in trajectory.turns}
        tokenizers = {policy: _tokenizer_file(folder, policy) for policy in policies}
        tokens = {}
        for turn in trajectory.turns:
            file = tokenizers[turn.policy]
            if file is not None:
                texts = _decode_tokens(file, turn.completion_ids)
                tokens[turn.node, turn.index] = list(zip(texts, turn.logprobs, strict=True))
        return tokens


def _is_inside(path: Path, folder: Path) -> bool:
    """Return True if a file lies in a folder after links in both are followed."""
    return path.resolve().is_relative_to(folder.resolve())


def _with_task_text(row: dict[str, Any], text: TaskText | None) -> dict[str, Any]:
    """Return a row of a list with its task's question and right answers, shortened."""
    if text is None:
        return {**row, "question": "", "right_answers": []}
    answers = [shorten(answer, _MAX_ANSWER_LETTERS) for answer in text.answers[:_MAX_ANSWERS]]
    return {
        **row,
        "question": shorten(text.question, _MAX_QUESTION_LETTERS),
        "right_answers": answers,
    }


def shorten(text: str, letters: int) -> str:
    """Return the beginning of a text, with an ellipsis if there is more."""
    return text if len(text) <= letters else f"{text[:letters]}…"


def escape_texts(value: Any) -> Any:
    """Return a JSON value with the control characters of its texts as escapes."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, Mapping):
        return {escape_texts(name): escape_texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_texts(item) for item in value]
    return value


@lru_cache(maxsize=8)
def _compute_credit(path: Path, modified_ns: int) -> tuple[TurnAdvantages, TurnGroups]:
    """Compute the advantages and the peer groups of the turns in a file of a training step.

    Both are empty for the file of an evaluation, and for a large file.

    The time of modification is a key of the cache, so that a modified file is read again.
    """
    is_training_step = path.parent.name == "trajectories"
    if not is_training_step or count_trajectories(path) > _MAX_TRAJECTORIES:
        return {}, {}
    return compute_turn_credit(path, read_trajectories(path))


def _tokenizer_file(run: Path, policy: str) -> Path | None:
    """Return the file of a policy's tokenizer, from its trained model or else from the model it starts with.

    None if neither model has a tokenizer on this machine.
    """
    models = [run / "train" / "models" / policy]
    with suppress(ConfigError, KeyError):
        models.append(Path(RunConfig.load(run / "config.yaml").policies[policy].model))
    for model in models:
        if (model / "tokenizer.json").is_file():
            return model / "tokenizer.json"
    return None


@lru_cache(maxsize=8)
def _load_tokenizer(file: Path, modified_ns: int) -> Tokenizer:
    """Load a tokenizer.

    The time of modification is a key of the cache, so that a modified file is read again.
    """
    return Tokenizer.from_file(str(file))


def _decode_tokens(file: Path, token_ids: tuple[int, ...]) -> list[str]:
    """Return the text that each token adds.

    A character that several tokens encode is added by the last of them.
    """
    tokenizer = _load_tokenizer(file, file.stat().st_mtime_ns)
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in token_ids]
