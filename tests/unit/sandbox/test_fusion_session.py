"""Sessions at a SandboxFusion server, by a stand-in with real notebook kernels."""

from __future__ import annotations

import asyncio
import base64
import io
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from rollout.config.environment import EnvConfig, build_env
from rollout.environments.data_science import pack_file, pack_target
from rollout.environments.predictions import Target
from rollout.sandbox import FusionSession, RunLimits, SandboxError, SandboxFusion, Verdict
from tests.support.casts import SUM
from tests.support.fusion_server import fusion_server

LIMITS = RunLimits(wall_s=20, disk_mb=1, output_kb=1, file_mb=1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fusion_server() as address:
        yield address


def use(url: str, scenario: Callable[[FusionSession], Awaitable[Any]]) -> Any:
    """Run a scenario in a session."""

    async def main() -> Any:
        async with SandboxFusion(url, retries=0) as client, client.session(LIMITS) as session:
            return await scenario(session)

    return asyncio.run(main())


@pytest.mark.slow
def test_cells_share_variables_and_files(url: str) -> None:
    async def scenario(session: FusionSession) -> None:
        await session.put("data/a.csv", b"1,2\n")
        first = await session.run("text = open('data/a.csv').read(); print('read')")
        assert (first.verdict, first.stdout, first.fresh) == (Verdict.OK, "read\n", True)
        second = await session.run("open('b.txt', 'w').write('b'); text")
        assert (second.stdout, second.fresh) == ("'1,2\\n'\n", False)
        assert await session.files() == {"data/a.csv": 4, "b.txt": 1}
        assert await session.get("b.txt") == b"b"
        session.end()
        third = await session.run("print(open('b.txt').read()); text")
        assert (third.verdict, third.stdout, third.fresh) == (Verdict.RE, "b\n", True)
        assert third.stderr.rstrip().endswith("NameError: name 'text' is not defined")
        assert await session.get("none") is None

    use(url, scenario)


@pytest.mark.slow
def test_a_cell_cannot_write_too_much_or_print_too_much(url: str) -> None:
    async def scenario(session: FusionSession) -> None:
        await session.put("a", b"a")
        large = await session.run("open('b', 'w').write('b' * (2 << 20)); kept = 1")
        assert large.verdict is Verdict.OLE
        assert large.stderr.endswith("The files cannot be read: they have more than 1 MB\n")
        assert await session.files() == {"a": 1}
        loud = await session.run("print('x' * 2000)")
        assert (loud.verdict, len(loud.stdout), loud.fresh) == (Verdict.OLE, 1024, True)

    use(url, scenario)


class Answers:
    """Server that sends recorded answers, and keeps the requests."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    async def send(self, body: dict[str, Any], wall_s: float) -> dict[str, Any]:
        self.bodies.append(body)
        return self.answers.pop(0)


LATE = {
    "status": "Failed",
    "message": "",
    "driver": {
        "status": "TimeLimitExceeded",
        "execution_time": 30.1,
        "return_code": None,
        "stdout": "config: ...",
        "stderr": "",
    },
    "cells": [],
    "files": {},
}


def test_a_cell_out_of_time_leaves_the_files_before_it() -> None:
    server = Answers(LATE, LATE)

    async def scenario() -> None:
        session = FusionSession(server.send, LIMITS, nullcontext)
        await session.put("a", b"1")
        result = await session.run("while True: pass")
        assert (result.verdict, result.fresh, result.wall_s) == (Verdict.TLE, True, 30.1)
        assert await session.files() == {"a": 1}
        await session.run("1")

    asyncio.run(scenario())
    first, second = server.bodies
    assert first["files"] == second["files"] == {"a": "MQ=="}
    assert (len(first["cells"]), len(second["cells"])) == (3, 3)  # the late cell is not repeated
    assert first["total_timeout"] == 20


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": "Failed", "message": "no kernel", "driver": None}, "failed: no kernel"),
        ({"status": "Success", "driver": None, "cells": []}, "malformed reply .IndexError"),
        ({}, "malformed reply .KeyError"),
    ],
)
def test_a_failure_of_the_server_is_no_verdict(answer: dict[str, Any], message: str) -> None:
    session = FusionSession(Answers(answer).send, LIMITS, nullcontext)
    with pytest.raises(SandboxError, match=message):
        asyncio.run(session.run("1"))


def damaged_archive() -> bytes:
    """Return an archive with a file of a kilobyte whose compressed bytes are damaged."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("a", b"1" * 1024)
    content = bytearray(archive.getvalue())
    first = 30 + len("a")  # of the compressed bytes, after the local header
    content[first : first + 4] = b"\xff" * 4
    return bytes(content)


def test_a_damaged_archive_leaves_the_files_before_it() -> None:
    cell = {"stdout": "1\n", "stderr": "", "display": [], "error": []}
    answer = {
        "status": "Success",
        "driver": {"execution_time": 1.0},
        "cells": [cell, cell, cell],
        "files": {".files.zip": base64.b64encode(damaged_archive()).decode()},
    }

    async def scenario() -> None:
        session = FusionSession(Answers(answer).send, LIMITS, nullcontext)
        await session.put("a", b"1")
        result = await session.run("print(1)")
        assert (result.verdict, result.stdout) == (Verdict.OLE, "1\n")
        assert result.stderr.startswith("The files cannot be read: Error -3")
        assert await session.files() == {"a": 1}

    asyncio.run(scenario())


@pytest.mark.slow
def test_data_science_is_played_at_a_server(url: str) -> None:
    target = Target(metric="mae", id_column="id", column="y", truth={"3": "6"}, baseline=1.0)
    task = replace(SUM, answers=(pack_file("test.csv", "id,x\n3,3\n"), pack_target(target)))
    env: Any = build_env(EnvConfig(name="data_science", options={"server": url}))(task)

    async def play() -> tuple[str, Any]:
        await env.open(task)
        env.reset(task)
        step = await env.step(
            "```python\nrow = open('test.csv').read().split()[1].split(',')\nprint(row)\n```"
        )
        await env.step(
            "```python\ny = 2 * float(row[1])\n"
            "open('submission.csv', 'w').write(f'id,y\\n{row[0]},{y}')\n```"
        )
        assert await env.files() == {"submission.csv": 10, "test.csv": 9}
        last = await env.step("<submit>")
        await env.close()
        return step.observation, last

    observation, last = asyncio.run(play())
    assert "['3', '3']" in observation
    assert (last.reward, last.metrics["mae"], last.metrics["solved"]) == (1.0, 0.0, 1.0)
