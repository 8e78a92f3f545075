"""Limits, verdicts and results of sandboxed programs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rollout.base.errors import EnvError


class Verdict(enum.StrEnum):
    """How a program ended, in the words of programming contests."""

    OK = "OK"  # it ended with status 0, or, where something is expected of it, its output is right
    WA = "WA"  # it ended with status 0 and its output is wrong
    RE = "RE"  # it ended with another status, an exception or a signal
    TLE = "TLE"  # out of processor or wall time
    MLE = "MLE"  # out of memory
    OLE = "OLE"  # too much output, or too many or too large files
    SE = "SE"  # the sandbox failed: nothing is known about the program. Raised as SandboxError, never scored


class SandboxError(EnvError):
    """The sandbox failed, not the program: the trajectory is masked, never scored 0."""

    verdict = Verdict.SE


class SandboxUnavailable(SandboxError):
    """This machine cannot run programs isolated, or not in the tier that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What one program may use."""

    wall_s: float = 12.0  # generous: on a busy machine processor time is the fair measure
    cpu_s: int = 6  # of one process
    memory_mb: int = 512  # address space of one process beyond the interpreter's
    cores: int = 1  # that it computes on, with all that it starts
    processes: int = 32  # at once, threads included
    output_kb: int = 1024  # of stdout, and of stderr
    file_mb: int = 16  # of one file
    disk_mb: int = 64  # of all files
    files: int = 2048  # at once, folders included
    open_files: int = 64

    def __post_init__(self) -> None:
        bad = [f"{name} is {value}" for name, value in asdict(self).items() if not value > 0]
        if bad:
            raise ValueError(f"limits of the sandbox: {', '.join(bad)}; each must be positive")
        if self.output_kb > 1024 * self.file_mb:
            raise ValueError(
                f"limits of the sandbox: output_kb is {self.output_kb}, more than file_mb ({self.file_mb})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program to run; see `Runner.run`."""

    source: str
    stdin: str | bytes = b""
    limits: RunLimits
    files: Mapping[str, bytes] = field(
        default_factory=dict
    )  # put into its folder first, by relative path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How one run ended."""

    verdict: Verdict
    stdout: str  # at most output_kb, bytes that are no UTF-8 replaced
    stderr: str
    exit_code: int  # negative: minus the signal that ended it
    wall_s: float
    cpu_s: float = 0.0  # of all its processes
    memory_mb: float = 0.0  # resident at the peak, of its largest process
    fresh: bool = True  # nothing of an earlier cell was there: always so outside a session


def without_middle(text: str, most: int) -> str:
    """The text, or of one that has more than `most` characters so many from its ends."""
    half = most // 2
    return (
        text
        if len(text) <= most
        else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    )


NO_OUTPUT = "[no output]"
ENDINGS = {  # in words
    Verdict.TLE: "out of time",
    Verdict.MLE: "out of memory",
    Verdict.OLE: "too much output",
    Verdict.RE: "it failed",
}


def render_result(result: RunResult, max_chars: int) -> str:
    """A result as a model reads it: what was printed, then stderr, then how it ended if not well.

    Of longer output the middle is left out.
    """
    text = "\n".join(part for part in (result.stdout.rstrip(), result.stderr.rstrip()) if part)
    text = without_middle(text, max_chars)
    ending = ENDINGS.get(result.verdict)
    if ending and not (result.verdict is Verdict.RE and result.stderr):
        text = f"{text}\n[{ending}]".lstrip()
    return text or NO_OUTPUT
