"""The client of a SandboxFusion server, with a scripted server."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.base import http
from rollout.config.environment import EnvConfig, build_env
from rollout.environments.code import pack_test
from rollout.environments.repository import CheckCall, pack_check, pack_source
from rollout.records.trajectory import Task
from rollout.sandbox import RunLimits, SandboxError, SandboxFusion, Verdict
from rollout.sandbox.judge import StdinTest, judge_all


class Server(ThreadingHTTPServer):
    """Server that answers with the entries (status, headers, body) of `script`; it repeats the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, dict[str, str], Any]] = []
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.delay_s = 0.0
        self.requests = 0  # in progress
        self.most_requests = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests += 1
            self.server.most_requests = max(self.server.most_requests, self.server.requests)
            self.server.seen.append((body, dict(self.headers.items()) | {"path": self.path}))
            status, headers, answer = self.server.script[0]
            if len(self.server.script) > 1:
                del self.server.script[0]
        time.sleep(self.server.delay_s)
        if callable(answer):
            answer = answer(body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with self.server.lock:
            self.server.requests -= 1
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def finished(
    stdout: str = "", code: int | None = 0, *, status: str = "Finished", stderr: str = ""
) -> dict[str, Any]:
    run = {
        "status": status,
        "execution_time": 0.25,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
    }
    outcome = "Success" if code == 0 and status == "Finished" else "Failed"
    return {
        "status": outcome,
        "message": "",
        "compile_result": None,
        "run_result": run,
        "files": {},
    }


def run_program(server: Server, **options: Any) -> Any:
    async def main() -> Any:
        async with SandboxFusion(
            server.url, RunLimits(wall_s=2, memory_mb=100, output_kb=1), retries=2
        ) as client:
            return await client.run("print(1)", **options)

    return asyncio.run(main())


def test_request_and_result(server: Server) -> None:
    server.script = [(200, {}, finished("1\n"))]
    result = run_program(server, stdin="in", files={"a": b"\x00\x01"})
    assert (result.verdict, result.stdout, result.exit_code, result.wall_s) == (
        Verdict.OK,
        "1\n",
        0,
        0.25,
    )
    body, headers = server.seen[0]
    assert headers["path"] == "/run_code"
    assert body == {
        "code": "print(1)",
        "language": "python",
        "stdin": "in",
        "compile_timeout": 2,
        "run_timeout": 2,
        "memory_limit_MB": 100,
        "files": {"a": "AAE="},
    }


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (finished(code=1, stderr="Traceback\nValueError: x\n"), "RE"),
        (finished(code=1, stderr="Traceback\nMemoryError\n"), "MLE"),
        (finished(code=None, status="TimeLimitExceeded"), "TLE"),
        (finished("x" * 1025), "OLE"),
    ],
)
def test_verdicts(server: Server, answer: dict[str, Any], verdict: str) -> None:
    server.script = [(200, {}, answer)]
    assert run_program(server).verdict == verdict


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"retry-after": "0"}, b""),
        (500, {}, b"oops"),
        (503, {}, b""),
        (200, {}, b"<html>"),
        (200, {}, b'{"status": "Suc'),
        (200, {}, []),
        (200, {}, {"status": "SandboxError", "message": "no space", "run_result": None}),
    ],
)
def test_a_failed_request_is_repeated(
    server: Server, failure: tuple[int, dict[str, str], Any]
) -> None:
    server.script = [failure, (200, {}, finished("1\n"))]
    assert run_program(server).stdout == "1\n"
    assert len(server.seen) == 2


def test_lasting_failure_is_an_error_and_not_a_verdict(server: Server) -> None:
    server.script = [
        (200, {}, {"status": "SandboxError", "message": "no space", "run_result": None})
    ]
    with pytest.raises(
        SandboxError, match=r"gives no verdict .its sandbox failed: no space.; is it running"
    ):
        run_program(server)
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "Success"},
        {"status": "Success", "run_result": {"status": "Finished"}},
        finished(status="Error"),
    ],
)
def test_an_answer_without_its_fields_is_an_error(server: Server, answer: dict[str, Any]) -> None:
    server.script = [(200, {}, answer)]
    with pytest.raises(SandboxError, match="malformed"):
        run_program(server)


def test_a_refused_request_is_not_repeated(server: Server) -> None:
    server.script = [(422, {}, b"no field stdin")]
    with pytest.raises(SandboxError, match="refused the request, status 422: no field stdin"):
        run_program(server)
    assert len(server.seen) == 1


def test_retry_after_is_honoured(server: Server) -> None:
    server.script = [(429, {"retry-after": "1"}, b""), (200, {}, finished("1\n"))]
    started_s = time.monotonic()
    assert run_program(server).stdout == "1\n"
    assert time.monotonic() - started_s >= 1.0


def test_no_server() -> None:
    with pytest.raises(SandboxError, match="is it running"):
        asyncio.run(SandboxFusion("http://127.0.0.1:9", retries=0).run("print(1)"))


def test_the_token_is_sent_and_not_shown(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    server.script = [(401, {}, b"who are you")]

    async def main() -> None:
        async with SandboxFusion(server.url, token_file=file) as client:
            with pytest.raises(SandboxError) as failure:
                await client.run("print(1)")
            assert "s3cret" not in f"{failure.value} {failure.value!r} {client!r}"

    asyncio.run(main())
    assert server.seen[0][1]["Authorization"] == "Bearer s3cret"


def test_the_server_judges_like_the_local_sandbox_within_its_slots(server: Server) -> None:
    server.script = [(200, {}, lambda body: finished(f"{int(body['stdin']) * 2}\n"))]
    server.delay_s = 0.05
    tests = [StdinTest(stdin=str(n), expected=str(2 * n if n != 3 else 0)) for n in range(6)]

    async def main() -> list[Verdict]:
        async with SandboxFusion(server.url, slots=2) as client:
            return [
                result.verdict
                for result in await judge_all(client, "print(2 * int(input()))", tests)
            ]

    assert asyncio.run(main()) == ["OK", "OK", "OK", "WA", "OK", "OK"]
    assert server.most_requests == 2
    assert "expected" not in json.dumps([body for body, _ in server.seen])


def test_the_code_environment_uses_the_server(server: Server) -> None:
    server.script = [(200, {}, lambda body: finished(f"{int(body['stdin']) * 2}\n"))]
    config = EnvConfig(name="code", options={"server": server.url, "reward": "rate"})
    answers = [
        pack_test(StdinTest(stdin=str(n), expected=str(2 * n if n else 9)), visible=False)
        for n in range(4)
    ]
    task = Task(
        id="t", prompt="Double.", answers=tuple(answers), env="code", source="s", split="test"
    )
    env = build_env(config)(task)
    env.reset(task)
    step = asyncio.run(env.step("```python\nprint(2 * int(input()))\n```"))
    assert step.reward == 0.75
    assert len(server.seen) == 4


def test_the_repository_environment_uses_the_server(server: Server) -> None:
    server.script = [
        (
            200,
            {},
            lambda body: finished(
                "6" if b"2 * n" in base64.b64decode(body["files"]["m.py"]) else "5"
            ),
        )
    ]
    check = CheckCall(
        name="a", module="m", function="double", arguments=(3,), expected=6, passes_before=False
    )
    answers = (pack_source("m.py", "def double(n):\n    return n + 2\n"), pack_check(check))
    task = Task(
        id="t",
        prompt="double(3) is 5.",
        answers=answers,
        env="repository",
        source="s",
        split="test",
    )
    env = build_env(EnvConfig(name="repository", options={"server": server.url, "max_turns": 2}))(
        task
    )
    env.reset(task)
    patch = "m.py\n<<<<<<< SEARCH\n    return n + 2\n=======\n    return {}\n>>>>>>> REPLACE"
    steps = [asyncio.run(env.step(patch.format(right))) for right in ("n + n", "2 * n")]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]
    assert (server.seen[0][0]["run_timeout"], server.seen[0][0]["memory_limit_MB"]) == (60.0, 1024)
