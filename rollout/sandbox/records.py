"""Limits, verdicts and results of sandboxed programs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rollout.base.errors import EnvError
from rollout.base.text import truncate_middle


class Verdict(enum.StrEnum):
    """Outcome of a program, in the terms of programming contests."""

    OK = "OK"  # exit status 0, and the expected output if the program is judged by a test
    WA = "WA"  # exit status 0, and wrong output
    RE = "RE"  # another exit status, an exception or a signal
    TLE = "TLE"  # out of CPU time or wall time
    MLE = "MLE"  # out of memory
    OLE = "OLE"  # too much output; without the tier "namespaces", also too many files or bytes on disk
    # The sandbox failed and nothing is known about the program. It is raised as a SandboxError and
    # never scored.
    SE = "SE"


class SandboxError(EnvError):
    """The sandbox failed, not the program; the trajectory is masked instead of scored with 0."""

    verdict = Verdict.SE


class SandboxUnavailable(SandboxError):
    """This machine cannot run isolated programs, or not with the requested isolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of one program.

    Attributes:
        wall_s: wall time in seconds. It is generous, because CPU time is the fair measure on a busy
            machine.
        cpu_s: CPU time in seconds of one process.
        memory_mb: address space in MiB of one process, in addition to the interpreter's. In the tier
            "namespaces", the memory that all processes of the program use together is limited too.
        cores: cores that the program and its children share.
        processes: processes and threads at the same time.
        output_kb: size in KiB of stdout, and of stderr.
        file_mb: size in MiB of one file.
        disk_mb: size in MiB of all files together.
        files: number of files and folders at the same time.
        open_files: open files of one process.
    """

    wall_s: float = 12.0
    cpu_s: int = 6
    memory_mb: int = 512
    cores: int = 1
    processes: int = 32
    output_kb: int = 1024
    file_mb: int = 16
    disk_mb: int = 64
    files: int = 2048
    open_files: int = 64

    def __post_init__(self) -> None:
        problems = [f"{name} is {value}" for name, value in asdict(self).items() if not value > 0]
        if problems:
            raise ValueError(f"limits of the sandbox: {', '.join(problems)}; each must be positive")
        if self.output_kb > 1024 * self.file_mb:
            raise ValueError(
                f"limits of the sandbox: output_kb is {self.output_kb}, "
                f"more than file_mb ({self.file_mb} MB, or {1024 * self.file_mb} kB)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with its input; see `Runner.run`."""

    source: str
    stdin: str | bytes = b""
    limits: RunLimits
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the working folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of one run.

    Attributes:
        stdout: first `output_kb` of the output, with bytes that are not UTF-8 replaced.
        stderr: first `output_kb` of the standard error, in the same way.
        exit_code: exit status; negative if a signal of this number ended the program.
        wall_s: wall time in seconds.
        cpu_s: CPU time in seconds of all processes of the program; 0 for a cell of a session.
        memory_mb: peak resident memory in MiB of its largest process; 0 for a cell of a session.
        fresh: True if the process had no state of an earlier cell, as always outside of a session.
    """

    verdict: Verdict
    stdout: str
    stderr: str
    exit_code: int
    wall_s: float
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Report of a jail about a job that has ended.

    Attributes:
        exit_code: exit status; negative if a signal of this number ended the job.
        kill_reason: limit for which the warden ended the job ("wall", "disk", "threads" or "memory"),
            "asked" if the host has asked for it, "" if the job ended without the warden.
        cpu_s: CPU time in seconds of all its processes.
        memory_bytes: peak resident memory of its largest process, or of that of an earlier job of
            the jail if that was larger.
        out_of_memory: True if the job failed and the kernel killed one of its processes because its
            control group had no memory left.
    """

    exit_code: int
    kill_reason: str
    cpu_s: float
    memory_bytes: int
    out_of_memory: bool


NO_OUTPUT = "[no output]"

# descriptions of failures for the model that wrote the program
ENDINGS = {
    Verdict.TLE: "out of time",
    Verdict.MLE: "out of memory",
    Verdict.OLE: "too much output",
    Verdict.RE: "it failed",
}


def render_result(result: RunResult, max_chars: int) -> str:
    """Return a result as a model reads it: stdout, stderr, and the failure if there was one.

    Args:
        max_chars: limit for stdout and stderr together; the middle of longer output is left out.
    """
    outputs = [result.stdout.rstrip(), result.stderr.rstrip()]
    text = truncate_middle("\n".join(output for output in outputs if output), max_chars)

    ending = ENDINGS.get(result.verdict)
    has_traceback = result.verdict is Verdict.RE and result.stderr
    if ending and not has_traceback:
        text = f"{text}\n[{ending}]".lstrip()
    return text or NO_OUTPUT
