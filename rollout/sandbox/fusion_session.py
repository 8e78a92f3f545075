"""Sessions at a SandboxFusion server: cells that share variables and files, by its `/run_jupyter`.

The server keeps nothing between two requests. So a cell is sent with the files and the earlier cells
of its process, which run again, and the files come back in an archive.
"""

from __future__ import annotations

import base64
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from rollout.sandbox.jail import check_box_path
from rollout.sandbox.records import RunLimits, RunResult, SandboxError, Verdict

# Files that the server itself writes into the folder of a session.
_SERVER_FILES = ("main.py", "tmp/sandbox/configs/input.json")
_ARCHIVE = ".files.zip"
# First cell of a request, which keeps the folder's path, and the last one, which packs its files.
_BEGIN = "import os as _os\n_session_folder = _os.getcwd()"
_PACK = f"""
import os as _os, zipfile as _zipfile
_archive_path = _os.path.join(_session_folder, {_ARCHIVE!r})
with _zipfile.ZipFile(_archive_path, "w", _zipfile.ZIP_DEFLATED) as _archive:
    for _folder, _, _names in _os.walk(_session_folder):
        for _name in _names:
            _path = _os.path.join(_folder, _name)
            if _os.path.isfile(_path) and not _os.path.islink(_path) and _path != _archive_path:
                _archive.write(_path, _os.path.relpath(_path, _session_folder))
"""
# Errors of reading an archive. A cell can change how its files are packed, so the archive may be
# damaged in any way.
_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

# Sends the body of a request with a deadline in seconds, and returns the answer.
SendCells = Callable[[dict[str, Any], float], Awaitable[dict[str, Any]]]


class FusionSession:
    """Cells that run one after another at a SandboxFusion server; `SandboxFusion.session` opens it.

    It has the methods of `Session`. Each cell repeats the earlier ones of its process, so a cell
    should not draw random numbers without a seed. A cell that runs out of time loses the variables
    and what it has written; the next cell is then `fresh`. The server bounds the memory.
    """

    def __init__(
        self,
        send: SendCells,
        limits: RunLimits,
        slot: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Initialize a session.

        Args:
            send: sends a request to `/run_jupyter`.
            limits: limits of each cell, of which `wall_s`, `output_kb` and `disk_mb` apply.
            slot: returns a context that each cell enters.
        """
        self._send = send
        self._limits = limits
        self._slot = slot
        self._cells: list[str] = []  # cells of the present process
        self._used_s = 0.0  # time that they took
        self._first_files: dict[str, bytes] = {}  # files at the start of the process
        self._files: dict[str, bytes] = {}

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        """Run one cell; print the value of a last expression, as a notebook does.

        Raises:
            SandboxError: the server failed.
        """
        is_fresh = not self._cells
        deadline_s = (wall_s or self._limits.wall_s) + self._used_s
        body = {
            "cells": [_BEGIN, *self._cells, source, _PACK],
            "total_timeout": deadline_s,
            "memory_limit_MB": self._limits.memory_mb,
            "files": {
                name: base64.b64encode(content).decode()
                for name, content in self._first_files.items()
            },
            "fetch_files": [_ARCHIVE],
        }
        async with self._slot():
            answer = await self._send(body, deadline_s)
        try:
            return self._read_answer(answer, source, is_fresh=is_fresh)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SandboxError(
                f"the sandbox server sent a malformed reply ({type(error).__name__}: {error})"
            ) from None

    async def put(self, name: str, content: bytes) -> None:
        """Write a file of the session, before its first cell or after `end`.

        Raises:
            ValueError: the path of the file leads out of the folder.
        """
        check_box_path(name)
        self._first_files[name] = content
        self._files[name] = content

    async def get(self, name: str) -> bytes | None:
        """Return a file; None if there is none."""
        return self._files.get(name)

    async def files(self) -> dict[str, int]:
        """Return the size in bytes of every file, by path."""
        return {name: len(content) for name, content in self._files.items()}

    def end(self) -> None:
        """End the process; the files stay."""
        self._cells.clear()
        self._used_s = 0.0
        self._first_files = dict(self._files)

    def _read_answer(self, answer: Mapping[str, Any], source: str, *, is_fresh: bool) -> RunResult:
        driver = answer["driver"] or {}
        took_s = float(driver.get("execution_time") or 0.0)
        cell_s = max(0.0, took_s - self._used_s)
        if answer["status"] != "Success":
            if driver.get("status") != "TimeLimitExceeded":
                raise SandboxError(
                    f"the sandbox server failed: {str(answer['message'] or driver)[:200]}"
                )
            self.end()
            return _result(Verdict.TLE, "", "", cell_s, is_fresh=is_fresh)

        cell = answer["cells"][len(self._cells) + 1]
        stdout = str(cell["stdout"])
        for shown in cell["display"]:
            stdout += f"{shown.get('text/plain', '')}\n"
        stderr = str(cell["stderr"])
        for error in cell["error"]:
            stderr += _COLOUR.sub("", "\n".join(error["traceback"])) + "\n"

        max_chars = self._limits.output_kb << 10
        verdict = Verdict.OK
        if cell["error"]:
            is_memory = cell["error"][0]["ename"] == "MemoryError"
            verdict = Verdict.MLE if is_memory else Verdict.RE
        if max(len(stdout), len(stderr)) > max_chars:
            verdict = Verdict.OLE
        try:
            self._files = self._unpack(base64.b64decode(answer["files"].get(_ARCHIVE, "")))
        except _ARCHIVE_ERRORS as error:
            # The cell wrote too much, or keeps Python from packing: the files before it stay.
            stderr += f"The files cannot be read: {error}\n"
            verdict = Verdict.OLE
            self.end()
        else:
            self._cells.append(source)
            self._used_s = took_s
        return _result(verdict, stdout[:max_chars], stderr[:max_chars], cell_s, is_fresh=is_fresh)

    def _unpack(self, content: bytes) -> dict[str, bytes]:
        """Return the files of an archive.

        Raises:
            One of _ARCHIVE_ERRORS: it is malformed, or larger than `disk_mb`.
        """
        files = {}
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > self._limits.disk_mb << 20:
                raise ValueError(f"they have more than {self._limits.disk_mb} MB")
            for entry in entries:
                check_box_path(entry.filename)
                if entry.filename not in _SERVER_FILES:
                    files[entry.filename] = archive.read(entry)
        return files


def _result(
    verdict: Verdict, stdout: str, stderr: str, wall_s: float, *, is_fresh: bool
) -> RunResult:
    return RunResult(
        verdict=verdict,
        stdout=stdout,
        stderr=stderr,
        exit_code=0 if verdict is Verdict.OK else 1,
        wall_s=wall_s,
        fresh=is_fresh,
    )
