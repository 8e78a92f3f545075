"""Client of a SandboxFusion server, which runs programs on another machine."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from retrieval.regular_files import read_regular_text
from rollout.base.http import HttpClient, Refused, Unanswered, retry
from rollout.sandbox.fusion_session import FusionSession
from rollout.sandbox.records import Program, RunLimits, RunResult, SandboxError, Verdict
from rollout.sandbox.runner import Runner

_T = TypeVar("_T")

_SERVER_OVERHEAD_S = 10.0  # added to the time that compiling and running may take
_MAX_REPLY_BYTES = 64 << 20


class SandboxFusion(Runner):
    """Client of a server that has SandboxFusion's `/run_code` and `/run_jupyter`.

    The server isolates programs. Limits for which the request has no field are the server's own.
    """

    def __init__(
        self,
        url: str,
        limits: RunLimits | None = None,
        *,
        slots: int = 16,
        retries: int = 4,
        token_file: Path | None = None,
    ) -> None:
        """Initialize a client without connecting.

        Args:
            url: base URL of the server.
            limits: limits of runs for which none are given; None: the defaults.
            slots: number of requests at the same time.
            retries: number of times that a failed request is repeated.
            token_file: file with the bearer token of the server, if the server demands one.
        """
        super().__init__(limits, slots)
        token = read_regular_text(token_file).strip() if token_file else None
        self._retries = retries
        self._http = HttpClient(url, token=token, max_reply_bytes=_MAX_REPLY_BYTES)

    async def aclose(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def session(self, limits: RunLimits | None = None) -> AsyncIterator[FusionSession]:
        """Yield a session whose cells share variables and files.

        Args:
            limits: limits of each cell.
        """
        yield FusionSession(self._run_cells, limits or self.limits, self._slot)

    async def _run(self, program: Program) -> RunResult:
        return await self._retry("/run_code", partial(self._attempt, program))

    async def _run_cells(self, body: dict[str, Any], wall_s: float) -> dict[str, Any]:
        """Send a request to `/run_jupyter`; return the answer, which may report a failure of the driver."""
        return await self._retry("/run_jupyter", partial(self._attempt_cells, body, wall_s))

    async def _retry(self, path: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Make a request, and repeat it while it may help.

        Raises:
            SandboxError: the server refuses the request, or gives no verdict.
        """
        url = self._http.url
        try:
            return await retry(attempt, retries=self._retries)
        except Refused as refusal:
            raise SandboxError(f"{url}{path} refused the request, {refusal}") from None
        except Unanswered as failure:
            raise SandboxError(
                f"the sandbox server {url} gives no verdict ({failure}); is it running, and is it "
                "SandboxFusion?"
            ) from None

    async def _attempt_cells(self, body: dict[str, Any], wall_s: float) -> dict[str, Any]:
        timeout_s = wall_s + 2 * _SERVER_OVERHEAD_S  # the server adds 10 s for its driver
        response = await self._http.send("POST", "/run_jupyter", body, timeout_s=timeout_s)
        response.raise_for_status()
        try:
            answer: dict[str, Any] = response.json()
            if answer["status"] != "SandboxError":
                return answer
        except (KeyError, TypeError, ValueError) as error:
            raise Unanswered(f"malformed reply ({type(error).__name__}: {error})") from None
        raise Unanswered(f"its sandbox failed: {str(answer.get('message'))[:200]}")

    async def _attempt(self, program: Program) -> RunResult:
        """Send a program once.

        Raises:
            Refused: the server refuses the request, which a retry cannot change.
            Unanswered: there is no verdict; a retry may help.
        """
        limits = program.limits
        response = await self._http.send(
            "POST",
            "/run_code",
            _request_body(program),
            timeout_s=2 * limits.wall_s + _SERVER_OVERHEAD_S,
        )
        response.raise_for_status()
        try:
            answer = response.json()
            if answer["status"] != "SandboxError":
                return _parse_result(answer, limits)
        except (KeyError, TypeError, ValueError) as error:
            raise Unanswered(f"malformed reply ({type(error).__name__}: {error})") from None
        raise Unanswered(f"its sandbox failed: {str(answer.get('message'))[:200]}")


def _request_body(program: Program) -> dict[str, Any]:
    stdin = program.stdin
    if isinstance(stdin, bytes):
        stdin = stdin.decode("utf-8", "replace")
    files = {name: base64.b64encode(content).decode() for name, content in program.files.items()}
    return {
        "code": program.source,
        "language": "python",
        "stdin": stdin,
        "compile_timeout": program.limits.wall_s,
        "run_timeout": program.limits.wall_s,
        "memory_limit_MB": program.limits.memory_mb,
        "files": files,
    }


def _parse_result(answer: dict[str, Any], limits: RunLimits) -> RunResult:
    """Return the result of a server's answer.

    Raises:
        KeyError, TypeError, ValueError: the answer does not have the expected fields.
    """
    run = answer["run_result"] or answer["compile_result"]
    stdout = str(run["stdout"] or "")
    stderr = str(run["stderr"] or "")
    return_code = run["return_code"]
    max_chars = limits.output_kb << 10

    if max(len(stdout), len(stderr)) > max_chars:
        verdict = Verdict.OLE
    else:
        verdict = _parse_verdict(run["status"], return_code, stderr)
    return RunResult(
        verdict=verdict,
        stdout=stdout[:max_chars],
        stderr=stderr[:max_chars],
        exit_code=-9 if return_code is None else int(return_code),
        wall_s=float(run["execution_time"] or 0.0),
    )


def _parse_verdict(status: str, return_code: int | None, stderr: str) -> Verdict:
    if status == "TimeLimitExceeded":
        return Verdict.TLE
    if status != "Finished":
        raise ValueError(f"status {status}")
    if return_code == 0:
        return Verdict.OK
    last_line = stderr.rstrip().rpartition("\n")[2]
    return Verdict.MLE if last_line.startswith("MemoryError") else Verdict.RE
