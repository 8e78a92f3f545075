"""Fake sandbox with scripted outputs of programs."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.sandbox import RunLimits, RunResult, Verdict


class Canned:
    """Sandbox whose programs print scripted outputs; other programs fail with a NameError.

    Attributes:
        runs: program and input of each run.
    """

    def __init__(self, outputs: Mapping[str | tuple[str, str], str]) -> None:
        """Initialize with outputs by (program, input) or by program."""
        self._outputs = outputs
        self.runs: list[tuple[str, str]] = []

    async def run(
        self, source: str, *, stdin: str | bytes = b"", limits: RunLimits | None = None, **_: object
    ) -> RunResult:
        program = source.strip()
        text = stdin if isinstance(stdin, str) else stdin.decode()
        run = (program, text.strip())
        self.runs.append(run)
        output = self._outputs.get(run, self._outputs.get(program))
        if output is None:
            return RunResult(
                verdict=Verdict.RE, stdout="", stderr="NameError", exit_code=1, wall_s=0.0
            )
        return RunResult(
            verdict=Verdict.OK, stdout=output, stderr="a warning", exit_code=0, wall_s=0.0
        )
