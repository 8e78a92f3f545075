"""`mcore-mas serve`: a run's agents and its whole team as models, by the commands of docs/gateway.md."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.run_folder import make_run

pytestmark = pytest.mark.usefixtures("forked_programs")

GUIDE = Path(__file__).parents[3] / "docs" / "gateway.md"


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and its first line about its URL or an error."""
    command = [sys.executable, "-W", "ignore", "-m", "mcore_mas", "serve", *arguments]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    lines = iter(child.stderr)
    return child, next(
        (line for line in lines if "/v1" in line or "error" in line), "it said nothing"
    )


@pytest.mark.slow
def test_the_commands_of_the_guide_serve_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "train").mkdir()
    folders = {policy: str(run / "base") for policy in ("solver", "verifier")}
    (run / "train" / "done.json").write_text(json.dumps({"policies": folders}))
    block = next(
        text for text in re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.S) if "serve" in text
    )
    server, listing, asking = block.replace("\\\n", "").splitlines()
    assert server == "mcore-mas serve results/demo_math --port 8000"
    child, output = started(str(run), "--port", "0", "--alias", "gpt-4o=solver")
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+", output)[0]  # type: ignore[index]

        def curl(line: str) -> Any:
            command = ["/bin/sh", "-c", line.replace("http://127.0.0.1:8000", url)]
            return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

        assert [model["id"] for model in curl(listing)["data"]] == [
            "demo_math",
            "solver",
            "verifier",
            "gpt-4o",
        ]
        reply = curl(asking)
        assert (reply["model"], reply["object"]) == ("demo_math", "chat.completion")
        assert reply["usage"]["completion_tokens"] > 40  # of several turns, each of at most 40
        asyncio.run(check_calls(url))
        # a second one of the same run, and a wide address without a token
        for arguments, error in (
            ((), "in use by process"),
            (("--host", "192.0.2.1"), "is not loopback"),
        ):
            other, refusal = started(str(run), "--port", "0", *arguments)
            assert other.wait() == 1 and error in refusal
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0


async def check_calls(url: str) -> None:
    """Check sampling parameters of calls to agents, and refused calls to the whole team."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        hi: Any = [{"role": "user", "content": "What is 3+4?"}]
        texts = [
            (await api.chat.completions.create(model="solver", messages=hi, temperature=0))
            .choices[0]
            .message.content
            for _ in range(2)
        ]
        assert texts[0] == texts[1]
        seeded = [
            (
                await api.chat.completions.create(
                    model="gpt-4o", messages=hi, temperature=2, seed=seed
                )
            )
            .choices[0]
            .message.content
            for seed in (1, 1, 2)
        ]
        assert seeded[0] == seeded[1] != seeded[2]
        warm = {
            (await api.responses.create(model="solver", input="3+4?", temperature=2)).output_text
            for _ in range(3)
        }
        assert len(warm) == 3
        tool: Any = {"type": "function", "function": {"name": "f"}}
        with pytest.raises(openai.BadRequestError, match="is a whole team, which takes no tools"):
            await api.chat.completions.create(model="demo_math", messages=hi, tools=[tool])
        with pytest.raises(
            openai.NotFoundError,
            match="no response '1': each call of a whole team stands by itself",
        ):
            await api.responses.create(
                model="demo_math", input="and 4?", previous_response_id="resp_1"
            )
        for words, error in (
            ("", "a whole team, which needs a problem"),
            ("7 " * 5000, "there is room for"),
        ):
            with pytest.raises(openai.BadRequestError, match=error):
                await api.chat.completions.create(
                    model="demo_math", messages=[{"role": "user", "content": words}]
                )
        assert [(await api.models.retrieve(name)).id for name in ("demo_math", "solver")] == [
            "demo_math",
            "solver",
        ]
        with pytest.raises(
            openai.NotFoundError, match="the models here: demo_math, solver, verifier, gpt-4o"
        ):
            await api.models.retrieve("planner")
        with pytest.raises(
            openai.NotFoundError, match="the models here: demo_math, solver, verifier, gpt-4o"
        ):
            await api.chat.completions.create(model="planner", messages=hi)
        counting = {"model": "solver", "messages": hi, "system": "S"}
        counted = httpx.post(
            f"{url}/v1/messages/count_tokens", json=counting, trust_env=False
        ).json()
        reply = httpx.post(
            f"{url}/v1/messages", json=counting | {"max_tokens": 1}, timeout=60, trust_env=False
        ).json()
        assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
        whole = httpx.post(
            f"{url}/v1/messages/count_tokens",
            json=counting | {"model": "demo_math"},
            trust_env=False,
        )
        assert (whole.status_code, whole.json()["error"]["type"]) == (400, "invalid_request_error")
        call = {
            "model": "demo_math",
            "messages": hi,
            "max_tokens": 9,
            "stop_sequences": [*string.printable.strip()],
        }
        reply = httpx.post(f"{url}/v1/messages", json=call, timeout=60, trust_env=False).json()
        assert reply["stop_reason"] == "stop_sequence"
        assert not set(reply["content"][0]["text"]) & set(string.printable.strip())
        assert (
            httpx.get(f"{url}/nowhere", trust_env=False).json()["error"]["type"]
            == "not_found_error"
        )
