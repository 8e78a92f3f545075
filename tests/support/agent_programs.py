"""Agent programs for tests: functions that play a job, and a script that is run as a command."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI

from rollout.orchestras.program import Job


async def two_numbers(job: Job) -> str:
    """Asks two agents side by side and answers with the first one's number."""
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=0) as api:
        said = await asyncio.gather(
            *(
                api.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": job.problem}]
                )
                for model in ("gpt-4o", "b")
            )
        )
    return said[0].choices[0].message.content or ""


async def in_turn(job: Job) -> str:
    """Asks `a`, then `b` about that, and answers with what `b` says."""
    said = job.problem
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=0) as api:
        for model in ("a", "b"):
            asked = await api.chat.completions.create(
                model=model, messages=[{"role": "user", "content": said}]
            )
            said = asked.choices[0].message.content or ""
    return said


async def patient(job: Job) -> str:
    """Asks `a` five times, and again where the connection is lost, as OpenAI's client does by itself."""
    messages: list[Any] = [{"role": "user", "content": job.problem}]
    async with AsyncOpenAI(base_url=job.openai_url, api_key=job.key, max_retries=6) as api:
        for _ in range(5):
            said = (await api.chat.completions.create(model="a", messages=messages)).choices[
                0
            ].message.content or ""
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "again"},
            ]
    return said


async def broken(job: Job) -> str:
    """Falls over after a call."""
    await two_numbers(job)
    raise RuntimeError("the program broke")


async def asleep(job: Job) -> str:
    """Never ends."""
    await asyncio.sleep(3600)
    return ""


async def exits(job: Job) -> str:
    """Ends the process, as command-line code does."""
    sys.exit(3)


async def gives_up(job: Job) -> str:
    """Cancels itself."""
    raise asyncio.CancelledError


async def stubborn(job: Job) -> str:
    """Goes on for two seconds, whatever it is told."""
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    return ""


def script(then: str = "") -> list[str]:
    """A command that asks agent `a` its standard input with the standard library alone, and prints the reply."""
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
    """Whether a process with `marker` in its command line lives."""
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    return any(marker in line and "ps -eo" not in line for line in listed.splitlines())
