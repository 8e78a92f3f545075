"""Programs run by a SandboxFusion server, or by another that speaks its `/run_code`."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from rollout.sandbox.jail import check_name
from rollout.sandbox.records import Limits, Result, SandboxError, Verdict

_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0
_ROOM_S = 10.0  # for the server's own work, beyond a program's wall time
_REPLY_BYTES = 64 << 20
_BUSY = (429, 500, 502, 503, 504)


class SandboxFusion:
    """The client, with the sandbox's `run`. Isolation is the server's, and so are limits that it has no field for."""

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        *,
        slots: int = 16,
        retries: int = 4,
        token_file: Path | None = None,
    ) -> None:
        """`slots` requests at once; `token_file` holds the server's bearer token, if it wants one."""
        self.limits = limits or Limits()
        self.retried = 0  # requests that were sent again
        self._url = url.rstrip("/")
        self._slots = slots
        self._retries = retries
        self._headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"} if token_file else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None

    async def run(
        self,
        source: str,
        *,
        stdin: str | bytes = b"",
        limits: Limits | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
    ) -> Result:
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
        if self._http is not None:
            await self._http.aclose()
            self._http = self._loop = None

    async def __aenter__(self) -> SandboxFusion:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self._slots)
            # trust_env off: a proxy variable must not send loopback traffic elsewhere.
            self._http = httpx.AsyncClient(base_url=self._url, headers=self._headers, trust_env=False)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The server's answer on a program; whatever else it says is tried again, but for a refusal."""
        trouble, pause_s = "no reply", 0.0
        for attempt in range(self._retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(max(pause_s, random.uniform(0, 2) * min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S)))
                pause_s = 0.0
            try:
                async with asyncio.timeout(timeout_s):
                    status, headers, content = await self._exchange(path, body)
                if status == 200:
                    answer = json.loads(content)
                    if answer["status"] != "SandboxError":
                        return dict(answer)
                    trouble = f"its sandbox failed: {str(answer.get('message'))[:200]}"
                elif status in _BUSY:
                    trouble = f"status {status}"
                    after = headers.get("retry-after", "")
                    pause_s = min(float(after), 10 * _MAX_BACKOFF_S) if after.isdecimal() else 0.0
                else:
                    raise SandboxError(f"{self._url}{path} refused the request, status {status}: {content[:200]!r}")
            except (httpx.TransportError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            except (ValueError, KeyError, TypeError) as error:
                trouble = f"malformed reply ({type(error).__name__})"
        raise SandboxError(f"the sandbox server {self._url} gives no verdict ({trouble}); is it running?")

    async def _exchange(self, path: str, body: dict[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        assert self._http is not None
        content = bytearray()
        async with self._http.stream("POST", path, json=body, timeout=None) as reply:
            async for part in reply.aiter_bytes():
                content += part
                if len(content) > _REPLY_BYTES:
                    raise ValueError("too long")
        return reply.status_code, reply.headers, bytes(content)


def _read(answer: dict[str, Any], limits: Limits) -> Result:
    """The result in an answer.

    Raises:
        SandboxError: it has not the fields it should have.
    """
    try:
        run = answer["run_result"] or answer["compile_result"]
        stdout, stderr = str(run["stdout"] or ""), str(run["stderr"] or "")
        code = run["return_code"]
        files = {name: base64.b64decode(content) for name, content in (answer.get("files") or {}).items()}
        result = Result(
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


def _verdict(status: str, code: int | None, length: int, limits: Limits, stderr: str) -> Verdict:
    if length > limits.output_kb << 10:
        return Verdict.OLE
    if status == "TimeLimitExceeded":
        return Verdict.TLE
    if status != "Finished":
        raise ValueError(f"status {status}")
    if code == 0:
        return Verdict.OK
    return Verdict.MLE if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else Verdict.RE
