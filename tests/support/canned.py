"""A sandbox that knows its programs by heart."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.sandbox import RunLimits, RunResult, Verdict


class Canned:
    """Prints what is written down for a program and its input, or for the program alone; others fail."""

    def __init__(self, outputs: Mapping[str | tuple[str, str], str]) -> None:
        self._outputs = outputs
        self.runs: list[tuple[str, str]] = []  # program, input

    async def run(
        self, source: str, *, stdin: str | bytes = b"", limits: RunLimits | None = None, **_: object
    ) -> RunResult:
        program, given = (
            source.strip(),
            (stdin if isinstance(stdin, str) else stdin.decode()).strip(),
        )
        self.runs.append((program, given))
        output = self._outputs.get((program, given), self._outputs.get(program))
        if output is None:
            return RunResult(
                verdict=Verdict.RE, stdout="", stderr="NameError", exit_code=1, wall_s=0.0
            )
        return RunResult(
            verdict=Verdict.OK, stdout=output, stderr="a warning", exit_code=0, wall_s=0.0
        )
