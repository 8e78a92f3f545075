"""Agent programs for tests: functions that do a job, and a script that is run as a command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI

from rollout.orchestras.program import Job


async def two_numbers(job: Job) -> str:
    """Ask two agents concurrently, and answer with the reply of the first."""
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=0) as client:
        replies = await asyncio.gather(
            _ask(client, "gpt-4o", job.problem), _ask(client, "b", job.problem)
        )
    return replies[0]


async def in_turn(job: Job) -> str:
    """Ask agent a, send its reply to agent b, and answer with the reply of b."""
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=0) as client:
        reply = await _ask(client, "a", job.problem)
        return await _ask(client, "b", reply)


ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["answer"],
    "additionalProperties": False,
}


async def in_json(job: Job) -> str:
    """Ask the solver for JSON and the verifier for text; answer with the number in the JSON."""
    messages: Any = [{"role": "user", "content": job.problem}]
    answer_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "Answer", "schema": ANSWER_SCHEMA},
    }
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=0) as client:
        completion = await client.chat.completions.create(
            model="solver", messages=messages, response_format=answer_format
        )
        await _ask(client, "verifier", job.problem)
    return str(json.loads(completion.choices[0].message.content or "")["answer"])


async def _ask(client: AsyncOpenAI, model: str, text: str) -> str:
    completion = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}]
    )
    return completion.choices[0].message.content or ""


async def patient(job: Job) -> str:
    """Ask agent a five times; OpenAI's client repeats calls whose connection is lost."""
    messages: list[Any] = [{"role": "user", "content": job.problem}]
    reply = ""
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=6) as client:
        for _ in range(5):
            completion = await client.chat.completions.create(model="a", messages=messages)
            reply = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": "again"})
    return reply


async def broken(job: Job) -> str:
    """Raise an exception after two calls."""
    await two_numbers(job)
    raise RuntimeError("the program broke")


async def asleep(job: Job) -> str:
    """Sleep for an hour."""
    await asyncio.sleep(3600)
    return ""


async def exits(job: Job) -> str:
    """End the process, as command-line code does."""
    sys.exit(3)


async def gives_up(job: Job) -> str:
    """Raise CancelledError, as a program that cancels its own task."""
    raise asyncio.CancelledError


async def stubborn(job: Job) -> str:
    """Ignore cancellation for two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    return ""


def script(then: str = "") -> list[str]:
    """Return a command that sends its standard input to agent a, and prints the reply.

    It uses the standard library only. `then` is code that runs before the reply is printed.
    """
    return [
        sys.executable,
        "-c",
        "import json, os, sys, urllib.request as u\n"
        "text = sys.stdin.read()\n"
        "assert text == os.environ['TASK']\n"
        "body = json.dumps({'model': 'a', 'messages': [{'role': 'user', 'content': text}]}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "reply = u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head))\n"
        f"answer = json.load(reply)['choices'][0]['message']['content']\n{then}\nprint(answer)",
    ]


def alive(marker: str) -> bool:
    """Return True if a process with `marker` in its command line runs."""
    listing = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    return any(marker in line and "ps -eo" not in line for line in listing.splitlines())
