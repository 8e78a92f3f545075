"""Log of a collection in progress: finished trajectories, and results of calls that are made only once.

A run that was killed during a collection finds the finished trajectories in the step's
`CollectionLog`. Trajectories that had not finished are sampled again with the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_json

from rollout.base.terminal import say
from rollout.records.files import validate_trajectory
from rollout.records.trajectory import Trajectory


class CollectionLog:
    """Append-only file of one step's collection, read when a run is restarted.

    Every line is a JSON object. The first one holds the digest of the recipe; a log of another
    recipe is started anew. A line that a kill has cut off is skipped. Calls are those of tools and
    environments that a restart must not repeat; each is named by the key that `CallRecord` makes.
    Results are looked up among those that the file held when it was opened.
    """

    def __init__(self, path: Path, recipe: str = "") -> None:
        """Read the log at `path`, if there is one.

        Args:
            path: file of the log.
            recipe: digest of the settings that determine which trajectories are sampled.
        """
        self._path = path
        self._recipe = recipe
        self._file: IO[bytes] | None = None  # opened by the first line that is added
        self._writable = True
        self._trajectories: dict[str, Mapping[str, Any]] = {}
        self._results: dict[str, Any] = {}

        rows = _read_rows(path)
        self._continued = next(rows, None) == {"recipe": recipe}
        if not self._continued:
            return
        for row in rows:
            if "result" in row:
                self._results[row["call"]] = row["result"]
            else:
                self._trajectories[row["name"]] = row["trajectory"]

    @property
    def newest_version(self) -> int:
        """Newest version of the weights that sampled a finished trajectory; 0 without any."""
        newest = 0
        for trajectory in self._trajectories.values():
            versions = [turn["policy_version"] for turn in trajectory["turns"]]
            newest = max([newest, *versions])
        return newest

    def trajectory(self, name: str) -> Trajectory | None:
        """Return the finished trajectory of this name, or None."""
        row = self._trajectories.get(name)
        return None if row is None else validate_trajectory(row)

    def add_trajectory(self, name: str, trajectory: Trajectory) -> None:
        """Append a finished trajectory."""
        self._append({"name": name, "trajectory": trajectory}, bytes_mode="base64")

    def has_call(self, call: str) -> bool:
        """Return True if the result of a call is logged."""
        return call in self._results

    def call_result(self, call: str) -> Any:
        """Return the logged result of a call as plain JSON values; None if it is None or not logged."""
        return self._results.get(call)

    def add_call(self, call: str, result: object) -> None:
        """Append the result of a call. A result that JSON cannot hold is left out."""
        try:
            self._append({"call": call, "result": result}, bytes_mode="utf8")
        except ValueError:
            return

    def remove(self) -> None:
        """Remove the file: the step has been collected."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path.is_file():
            self._path.unlink()

    def _append(self, row: Mapping[str, Any], bytes_mode: Any) -> None:
        """Write a line at once. If writing fails, print one warning and go on without the log."""
        line = to_json(row, inf_nan_mode="constants", bytes_mode=bytes_mode) + b"\n"
        if not self._writable:
            return
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(line)
        except OSError as error:
            self._writable = False
            say(
                f"{self._path}: cannot be written ({error.strerror}); "
                "if the run is killed now, it samples this step again"
            )

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab" if self._continued else "wb", buffering=0)
        if self._continued:
            file.write(b"\n")  # ends a line that a kill has cut off
        else:
            file.write(to_json({"recipe": self._recipe}) + b"\n")
        return file


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the complete lines of a log; nothing if there is no file."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        yield row
