"""One program in one jail, from its start to its result, and what the end of its process says about it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.sandbox.guest.program import OUT_OF_MEMORY
from rollout.sandbox.jail import Jail, as_file, take_text
from rollout.sandbox.records import Limits, Result, SandboxError, Verdict

_GRACE_S = 5.0  # for a warden to report, beyond the job's wall time


async def execute(
    jail: Jail,
    source: str,
    stdin: str | bytes,
    limits: Limits,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
) -> Result:
    """Run a program in a jail that was just lent; see `Sandbox.run`.

    Raises:
        SandboxError: the jail failed.
    """
    handles: list[int] = []
    try:
        jail.open(limits)
        for name, content in files.items():
            await jail.put(name, content)
        for text in (source, stdin, None, None):
            handles.append(as_file(text))
        began = time.monotonic()
        jail.start("program", handles)
        ended = await _end(jail, limits.wall_s + _GRACE_S)
        wall_s = time.monotonic() - began
        found = {name: await jail.get(name, limits.file_mb << 20) for name in fetch}
        stdout, stderr = (take_text(handle, limits.output_kb << 10) for handle in handles[2:])
    finally:
        for handle in handles:
            os.close(handle)
    return Result(
        verdict=judge_end(ended, limits, stdout.complete and stderr.complete),
        stdout=stdout.text,
        stderr=stderr.text,
        exit_code=ended["exit"],
        wall_s=wall_s,
        cpu_s=ended["cpu_s"],
        memory_mb=ended["memory_bytes"] / 2**20,
        files={name: content for name, content in found.items() if content is not None},
    )


async def _end(jail: Jail, patience_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(patience_s):
            return await jail.ended()
    except TimeoutError:
        raise SandboxError(f"a job's warden did not report within {patience_s:g} s") from None


def judge_end(ended: dict[str, Any], limits: Limits, output_complete: bool) -> Verdict:
    """The verdict on a job from its warden's report, in which `ran_out` says that the kernel killed for memory."""
    code = ended["exit"]
    if not output_complete or ended["killed"] == "disk":
        return Verdict.OLE
    if ended["killed"]:
        return Verdict.TLE
    if ended.get("ran_out") or code == OUT_OF_MEMORY:
        return Verdict.MLE
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended["cpu_s"] >= limits.cpu_s):
        return Verdict.TLE
    return Verdict.OK if code == 0 else Verdict.RE
