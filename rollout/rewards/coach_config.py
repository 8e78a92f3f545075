"""Config section `coach`: the judging model, the turns that it scores, and the material that it is shown."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.engines.remote.config import RemoteConfig


class CoachConfig(RemoteConfig):
    """A frozen external model that scores the turns of a run's agents."""

    # Agents whose turns are scored; empty: all agents.
    agents: tuple[str, ...] = ()
    # Agents whose turns are judged with the ground truth in the prompt.
    judged_with_answer: tuple[str, ...] = ()
    # Agents whose turns are judged with the outcome and the final metrics in the prompt.
    metrics_for: tuple[str, ...] = ()
    # Form of a verdict. "answer_first": the coach does the agent's task itself, writes its result
    # down, and grades by comparison, unless the prompt has the ground truth to compare with. "grade":
    # it explains a grade.
    form: Literal["answer_first", "grade"] = "answer_first"
    # Request an outcome score in addition to the process score.
    outcome: bool = False
    # Sampling temperature of a verdict.
    temperature: float = Field(0.0, ge=0)
    # Most tokens of a verdict.
    max_tokens: int = Field(2048, ge=1)
    # Most characters of each text in the prompt: the problem, the agent's input and output, the
    # ground truth.
    text_chars: int = Field(24000, ge=1)
    # Most characters of the query and of the result of each tool call of the turn, and of each list
    # of files.
    observation_chars: int = Field(2000, ge=1)
    # Most characters of the query and of the result of each tool call of earlier turns.
    earlier_chars: int = Field(500, ge=1)
    # Deadline of the verdicts on all turns of a batch of tasks, in seconds. The tasks of a step are
    # one batch; if a filter drops groups, each resampling is one more.
    batch_deadline_s: float = Field(1800.0, gt=0)
    # When the budget is spent: "stop" the run, which can be resumed, or "mask" the turns without a
    # score.
    when_exhausted: Literal["stop", "mask"] = "stop"
    # Score of a turn that could not be judged; None: the turn has no score and is masked.
    fallback: float | None = Field(None, ge=0, le=10)
