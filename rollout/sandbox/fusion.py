"""Sandbox client: programs are run by a SandboxFusion server, or by another that speaks its `/run_code`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.base.http import HttpClient, Refused, Unanswered, retried
from rollout.sandbox.jail import check_name
from rollout.sandbox.records import RunLimits, RunResult, SandboxError, Verdict

_ROOM_S = 10.0  # for the server's own work, beyond a program's wall time
_REPLY_BYTES = 64 << 20


class SandboxFusion:
    """The client, with the sandbox's `run`. Isolation is the server's, and so are limits that it has no field for."""

    def __init__(
        self,
        url: str,
        limits: RunLimits | None = None,
        *,
        slots: int = 16,
        retries: int = 4,
        token_file: Path | None = None,
    ) -> None:
        """`slots` requests at once; `token_file` holds the server's bearer token, if it wants one."""
        self.limits = limits or RunLimits()
        self.retried = 0  # requests that were sent again
        self._slots = slots
        self._retries = retries
        token = token_file.read_text().strip() if token_file else None
        self._http = HttpClient(url, token=token, most_bytes=_REPLY_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        source: str,
        *,
        stdin: str | bytes = b"",
        limits: RunLimits | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """Run a program to its end; see `Sandbox.run`.

        Raises:
            SandboxError: the server failed, refused, or said that its sandbox failed, after all retries.
            ValueError: a path leads out of the folder.
        """
        limits, files = limits or self.limits, files or {}
        for name in (*files, *fetch):
            check_name(name)
        body = {
            "code": source,
            "language": "python",
            "stdin": stdin if isinstance(stdin, str) else stdin.decode("utf-8", "replace"),
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": list(fetch),
        }
        self._enter_loop()
        async with self._free:
            return _read(await self._post("/run_code", body, 2 * limits.wall_s + _ROOM_S), limits)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._http.aclose()

    async def __aenter__(self) -> SandboxFusion:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self._slots)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The server's answer on a program; whatever else it says is tried again, but for a refusal."""

        async def attempt() -> dict[str, Any]:
            reply = (await self._http.send("POST", path, body, timeout_s=timeout_s)).succeeded()
            try:
                answer = dict(reply.json())
                failed = answer["status"] == "SandboxError"
            except (KeyError, TypeError, ValueError) as error:
                raise Unanswered(f"malformed reply ({type(error).__name__})") from None
            if failed:
                raise Unanswered(f"its sandbox failed: {str(answer.get('message'))[:200]}")
            return answer

        url = self._http.url
        try:
            return await retried(attempt, retries=self._retries, note=self._count)
        except Refused as refusal:
            raise SandboxError(f"{url}{path} refused the request, {refusal}") from None
        except Unanswered as trouble:
            raise SandboxError(f"the sandbox server {url} gives no verdict ({trouble}); is it running?") from None

    def _count(self) -> None:
        self.retried += 1


def _read(answer: dict[str, Any], limits: RunLimits) -> RunResult:
    """The result in an answer.

    Raises:
        SandboxError: it has not the fields it should have.
    """
    try:
        run = answer["run_result"] or answer["compile_result"]
        stdout, stderr = str(run["stdout"] or ""), str(run["stderr"] or "")
        code = run["return_code"]
        files = {name: base64.b64decode(content) for name, content in (answer.get("files") or {}).items()}
        result = RunResult(
            verdict=_verdict(run["status"], code, max(len(stdout), len(stderr)), limits, stderr),
            stdout=stdout[: limits.output_kb << 10],
            stderr=stderr[: limits.output_kb << 10],
            exit_code=-9 if code is None else int(code),
            wall_s=float(run["execution_time"] or 0.0),
            files=files,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SandboxError(f"the sandbox server's answer is malformed ({type(error).__name__}: {error})") from error
    return result


def _verdict(status: str, code: int | None, length: int, limits: RunLimits, stderr: str) -> Verdict:
    if length > limits.output_kb << 10:
        return Verdict.OLE
    if status == "TimeLimitExceeded":
        return Verdict.TLE
    if status != "Finished":
        raise ValueError(f"status {status}")
    if code == 0:
        return Verdict.OK
    return Verdict.MLE if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else Verdict.RE
