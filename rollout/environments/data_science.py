"""Data-science environment: programs work in one folder of tables, and predictions are scored on hidden truths."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from rollout.base.errors import EnvError
from rollout.environments.code import last_program
from rollout.environments.predictions import TABLE_METRICS, Target
from rollout.environments.protocol import AgentMistake, Step, ToolCall
from rollout.environments.running import PRINTED_CHARS, Tier, own_sandbox
from rollout.records.trajectory import Task
from rollout.sandbox import Sandbox, Session
from rollout.sandbox.records import RunLimits, Verdict, render_result

SUBMIT = "<submit>"  # the action that has the submission scored
SUBMISSION = "submission.csv"


def pack_file(name: str, content: str | Path) -> str:
    """A file that the team may read, as one of a task's `answers`; of a path it is read when a trajectory starts."""
    return json.dumps(
        {"file": name, "content" if isinstance(content, str) else "path": str(content)}
    )


def pack_target(target: Target) -> str:
    """What is to be predicted, with its truths, as one of a task's `answers`; no model or program ever sees it."""
    return json.dumps({"target": asdict(target)})


@dataclass(eq=False, kw_only=True)
class DataScienceEnv:
    """A table to predict, in a session of the sandbox.

    A fenced program in an action is run as a cell: variables stay until `forget`, files until the end. `<submit>` in an
    action, or the `max_turns`th step, ends the trajectory: `submission.csv` is read from the folder and scored on this
    side of the wall. A missing or malformed one has the reward `malformed`. Any other action changes nothing. Metrics:
    the task's own by its name, where there was something to score; `normalised` (0 otherwise); `submitted`;
    `malformed_submission`; `solved`, 1 for a submission that beats the baseline, or for any where there is none.

    Args:
        tier: how programs are isolated on this machine.
        reward: `normalised`, the score in [0, 1] by its metric; or `gap`, DSBench's share of the gap from baseline to
            ceiling.
        malformed: reward without a submission that can be scored.
        max_turns: steps at most; null: any number.
        cell_s: seconds of a cell on the clock.
        memory_mb: memory of a cell.
        cores: that a cell computes on, with all that it starts.
        disk_mb: size of the folder, and of a file in it.
    """

    task: Task = field(kw_only=False)
    sandbox: Sandbox | None = None  # in place of this process's own
    tier: Tier = "auto"
    reward: Literal["normalised", "gap"] = "normalised"
    malformed: float = 0.0
    max_turns: PositiveInt | None = None
    cell_s: PositiveFloat = 60.0
    memory_mb: PositiveInt = 2048
    cores: PositiveInt = 1
    disk_mb: PositiveInt = 256
    _open: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    _session: Session | None = field(default=None, init=False)
    _target: Target | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    async def open(self, task: Task) -> None:
        """Open a folder with the task's files."""
        files, self._target = unpack_files(task)
        sandbox = self.sandbox or own_sandbox(self.tier)
        if not hasattr(sandbox, "session"):
            raise EnvError(
                f"{type(sandbox).__name__} has no sessions; data science needs the local sandbox"
            )
        sizes = {"memory_mb": self.memory_mb, "disk_mb": self.disk_mb, "file_mb": self.disk_mb}
        limits = RunLimits(wall_s=self.cell_s, cores=self.cores, **sizes)
        self._session = await self._open.enter_async_context(sandbox.session(limits))
        try:
            for name, content in files.items():
                await self._session.put(name, content)
        except (OSError, ValueError) as error:
            raise EnvError(
                f"task {task.id}: file {name} cannot be put into the sandbox ({error})"
            ) from error

    async def close(self) -> None:
        self._session = None
        await self._open.aclose()

    def reset(self, task: Task) -> str:
        self._steps = 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Run the action's program, or have the submission scored."""
        self._steps += 1
        program = last_program(action)
        call = None if program is None or SUBMIT in action else await self.run(program)
        if SUBMIT in action or self._steps == self.max_turns:
            return await self._score((call,) if call else ())
        if call is None:
            return Step(observation=f"There was neither a program nor {SUBMIT}.")
        return Step(observation=call.result, tools=(call,))

    async def run(self, program: str) -> ToolCall:
        result = await self._opened().run(program)
        failed = result.verdict is not Verdict.OK
        return ToolCall(
            tool="python", query=program, result=render_result(result, PRINTED_CHARS), failed=failed
        )

    async def files(self) -> Mapping[str, int]:
        return dict(sorted((await self._opened().files()).items()))

    async def forget(self) -> None:
        self._opened().end()

    async def _score(self, tools: tuple[ToolCall, ...]) -> Step:
        target = self._target
        assert target is not None
        content = await self._opened().get(SUBMISSION)
        metrics = {
            "submitted": float(content is not None),
            "malformed_submission": 0.0,
            "normalised": 0.0,
        }
        answer = observation = ""
        try:
            if content is None:
                raise AgentMistake(f"there is no {SUBMISSION}")
            score = target.score(content.decode("utf-8", errors="replace"))
            reward, answer = target.normalise(score, self.reward), f"{score:.6g}"
            normalised, solved = (
                target.normalise(score, "normalised"),
                float(target.beats_baseline(score)),
            )
            metrics |= {target.metric: score, "normalised": normalised, "solved": solved}
        except AgentMistake as error:
            metrics |= {"malformed_submission": metrics["submitted"], "solved": 0.0}
            observation, reward = f"The submission cannot be scored: {error}.", self.malformed
        except ValueError as error:  # the task's own fault
            raise EnvError(str(error)) from error
        return Step(
            observation=observation,
            reward=reward,
            done=True,
            answer=answer,
            tools=tools,
            metrics=metrics,
        )

    def _opened(self) -> Session:
        if self._session is None:
            raise EnvError("DataScienceEnv is used before open")
        return self._session


def unpack_files(task: Task) -> tuple[dict[str, bytes], Target]:
    """The files that the team may read, by name, and what it is to predict.

    Raises:
        EnvError: the answers cannot be read, or one file of them is missing.
    """
    files: dict[str, bytes] = {}
    target = None
    try:
        for text in task.answers:
            fields = json.loads(text)
            if "target" in fields:
                target = Target(**fields["target"])
            elif "path" in fields:
                files[fields["file"]] = Path(fields["path"]).read_bytes()
            else:
                files[fields["file"]] = fields["content"].encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvError(f"task {task.id}: its answers are no files and target ({error})") from error
    if target is None or target.metric not in TABLE_METRICS:
        known = ", ".join(TABLE_METRICS)
        raise EnvError(
            f"task {task.id} has no target, or a metric that is not known; metrics: {known}"
        )
    return files, target
