"""Data science environment: agents' programs work in a folder of tables and predict columns.

The submission is scored outside the sandbox, against truths that are not in the sandbox.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from retrieval.regular_files import read_regular_bytes
from rollout.base.errors import EnvError
from rollout.base.urls import Url
from rollout.environments.fenced_programs import last_program
from rollout.environments.predictions import Target
from rollout.environments.protocol import AgentMistake, Step, ToolCall, after_thought
from rollout.environments.running import PRINTED_CHARS, Tier, local_sandbox, sandbox_server
from rollout.environments.table_metrics import TABLE_METRICS
from rollout.records.trajectory import Task
from rollout.sandbox import FusionSession, Sandbox, SandboxFusion, Session
from rollout.sandbox.records import RunLimits, Verdict, render_result

SUBMIT = "<submit>"  # in an action: score the submission
SUBMISSION = "submission.csv"
_MAX_TABLE_BYTES = 1 << 30  # limit of one file


def pack_file(name: str, content: str | Path) -> str:
    """Return the entry of `Task.answers` for a file that the team may read.

    The answers of a task hold its files and its target; `unpack_answers` decodes them.

    Args:
        name: name of the file in the folder of the programs.
        content: text of the file, or the path of a file that is read when a trajectory starts.
    """
    key = "content" if isinstance(content, str) else "path"
    return json.dumps({"file": name, key: str(content)})


def pack_target(target: Target) -> str:
    """Return the entry of `Task.answers` for a target with its truths; agents do not see it."""
    return json.dumps({"target": asdict(target)})


@dataclass(eq=False, kw_only=True)
class DataScienceEnv:
    """Prediction of a table by programs in a session of the sandbox.

    `<submit>` in an action, or the step number `max_turns`, ends the trajectory: `submission.csv` is
    read from the folder and scored outside the sandbox. A missing or malformed submission gets the
    reward `malformed`. In an action without `<submit>`, a fenced program runs as a cell: its variables
    last until `forget`, its files until the end. An action with neither changes nothing. The text up to
    the last `</think>` of an action is ignored.

    Metrics: the score under the name of the task's metric, if a submission was scored; `normalised`
    (0 without a score); `submitted`; `malformed_submission`; `solved`, 1 if the submission was
    scored and, where there is a baseline, beats it.

    Args:
        server: address of a SandboxFusion server that runs the programs; null: this machine. Such a
            server keeps no variables, so with each cell the cells since the last `forget` run again.
        tier: tier of isolation of programs on this machine.
        reward: `normalised`, the score mapped to [0, 1], where 1 is the best; or `gap`, the share of
            the way from the baseline to the ceiling, as in DSBench.
        malformed: reward without a submission that can be scored.
        max_turns: maximum number of steps; null: no limit.
        cell_s: seconds of wall time that a cell may take.
        memory_mb: memory that a cell may use.
        cores: cores of a cell and of the processes that it starts.
        disk_mb: largest size of the folder, and of each file in it.
    """

    task: Task = field(kw_only=False)
    # Runner in place of `server` and of this process's sandbox.
    sandbox: Sandbox | SandboxFusion | None = None
    server: Url | None = None
    tier: Tier = "auto"
    reward: Literal["normalised", "gap"] = "normalised"
    malformed: float = 0.0
    max_turns: PositiveInt | None = None
    cell_s: PositiveFloat = 60.0
    memory_mb: PositiveInt = 2048
    cores: PositiveInt = 1
    disk_mb: PositiveInt = 256
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    _session: Session | FusionSession | None = field(default=None, init=False)
    _target: Target | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    async def open(self, task: Task) -> None:
        """Open a session of the sandbox whose folder holds the task's files.

        Raises:
            EnvError: the task's files cannot be read or written.
        """
        files, self._target = unpack_answers(task)
        sandbox = self.sandbox
        if sandbox is None:
            sandbox = sandbox_server(self.server) if self.server else local_sandbox(self.tier)
        limits = RunLimits(
            wall_s=self.cell_s,
            cores=self.cores,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            file_mb=self.disk_mb,
        )
        opening: AbstractAsyncContextManager[Session | FusionSession] = sandbox.session(limits)
        session = await self._resources.enter_async_context(opening)
        self._session = session
        try:
            for name, content in files.items():
                await session.put(name, content)
        except (OSError, ValueError) as error:
            raise EnvError(
                f"task {task.id}: file {name} cannot be put into the sandbox ({error})"
            ) from error

    async def close(self) -> None:
        self._session = None
        await self._resources.aclose()

    def reset(self, task: Task) -> str:
        self._steps = 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Run the action's program, or score the submission."""
        self._steps += 1
        submit = SUBMIT in after_thought(action)
        program = last_program(action)
        call = None
        if program is not None and not submit:
            call = await self.run(program)

        if submit or self._steps == self.max_turns:
            return await self._score((call,) if call else ())
        if call is None:
            return Step(observation=f"There was neither a program nor {SUBMIT}.")
        return Step(observation=call.result, tools=(call,))

    async def run(self, program: str) -> ToolCall:
        result = await self._current_session().run(program)
        return ToolCall(
            tool="python",
            query=program,
            result=render_result(result, PRINTED_CHARS),
            failed=result.verdict is not Verdict.OK,
        )

    async def files(self) -> Mapping[str, int]:
        return dict(sorted((await self._current_session().files()).items()))

    async def forget(self) -> None:
        self._current_session().end()

    async def _score(self, tools: tuple[ToolCall, ...]) -> Step:
        """Score the submission and end the trajectory."""
        target = self._target
        assert target is not None
        content = await self._current_session().get(SUBMISSION)
        metrics = {
            "submitted": float(content is not None),
            "malformed_submission": 0.0,
            "normalised": 0.0,
        }
        observation = ""
        answer = ""
        try:
            if content is None:
                raise AgentMistake(f"there is no {SUBMISSION}")
            score = target.score(content.decode("utf-8", errors="replace"))
            reward = target.normalise(score, self.reward)
            answer = f"{score:.6g}"
            metrics[target.metric] = score
            metrics["normalised"] = target.normalise(score, "normalised")
            metrics["solved"] = float(target.beats_baseline(score))
        except AgentMistake as error:
            reward = self.malformed
            observation = f"The submission cannot be scored: {error}."
            metrics["malformed_submission"] = metrics["submitted"]
            metrics["solved"] = 0.0
        except ValueError as error:  # the task is at fault, such as a gap without a baseline
            raise EnvError(str(error)) from error
        return Step(
            observation=observation,
            reward=reward,
            done=True,
            answer=answer,
            tools=tools,
            metrics=metrics,
        )

    def _current_session(self) -> Session | FusionSession:
        if self._session is None:
            raise EnvError("DataScienceEnv is used before open")
        return self._session


def unpack_answers(task: Task) -> tuple[dict[str, bytes], Target]:
    """Decode the answers of a task, which `pack_file` and `pack_target` have encoded.

    Returns:
        The content of each file that the team may read, by file name; and the target.

    Raises:
        EnvError: the answers cannot be read, a file or the target is missing, or the metric is unknown.
    """
    files: dict[str, bytes] = {}
    target = None
    try:
        for text in task.answers:
            fields = json.loads(text)
            if "target" in fields:
                target = Target(**fields["target"])
            elif "path" in fields:
                files[fields["file"]] = read_regular_bytes(Path(fields["path"]), _MAX_TABLE_BYTES)
            else:
                files[fields["file"]] = fields["content"].encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvError(f"task {task.id}: its answers are not files and target ({error})") from error
    if target is None or target.metric not in TABLE_METRICS:
        raise EnvError(
            f"task {task.id} has no target, or a metric that is not known; metrics: "
            f"{', '.join(TABLE_METRICS)}"
        )
    return files, target
