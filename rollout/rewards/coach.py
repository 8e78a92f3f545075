"""Coach (an LLM judge): a frozen external model that scores the turns of finished trajectories."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from rollout.base.async_tasks import cancel_tasks
from rollout.base.http import Refused, Unanswered
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.ledger import BudgetExhausted
from rollout.engines.remote.protocol import ReplySettings
from rollout.records.trajectory import Group, Message, Status, Trajectory, Turn
from rollout.rewards.coach_config import CoachConfig
from rollout.rewards.coach_prompt import coach_messages, repair_messages, requires_own_answer
from rollout.rewards.coach_verdict import MalformedVerdict, parse_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """Failure to judge a turn.

    Attributes:
        kind: "unavailable" if the coach did not answer, "refused" if it refused the prompt, "malformed"
            if it gave a malformed verdict twice, "deadline" if the turn or its batch took too long, and
            "budget" if the call might exceed the budget.
        message: the reason, for people.
    """

    kind: Literal["unavailable", "refused", "malformed", "deadline", "budget"]
    message: str


Judgement = dict[str, float] | Unscored  # scores of a turn by name, or the failure

_TurnPosition = tuple[int, int, int]  # indices of group, trajectory and turn


@dataclass(slots=True)
class _AgentStatistics:
    """Calls, scores and failures of one agent's turns since the metrics were last read."""

    tally: Tally = field(default_factory=Tally)
    process_scores: list[float] = field(default_factory=list)
    failures: int = 0


class Coach:
    """Client of the judging model.

    A turn that cannot be judged gets no score, or the configured `fallback`.

    Attributes:
        last_failure: reason why the last failed turn could not be judged, "" if none has failed.
    """

    def __init__(self, config: CoachConfig, cache_folder: Path) -> None:
        """Read the API key, and open the ledger of replies and spending in `cache_folder`.

        Create the coach before child processes start, because it removes the variable of the key
        from the environment of this process.

        Raises:
            RemoteError: the key or the provider's library is missing, or the ledger cannot be
                opened.
        """
        self._config = config
        self._caller = Caller(config, cache_folder)
        self._settings = ReplySettings(temperature=config.temperature, max_tokens=config.max_tokens)
        self._statistics: dict[str, _AgentStatistics] = defaultdict(_AgentStatistics)  # by agent
        self._failures_by_kind: Counter[str] = Counter()
        self.last_failure = ""

    async def score(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with `scores["process"]`, and other requested scores, on the turns that were judged.

        Turns of completed trajectories are judged, except masked turns and turns of agents that the
        config leaves out. At most `concurrency` are judged at a time, each within `deadline_s`, and
        all within `batch_deadline_s`.

        Raises:
            RemoteError: the model cannot be used at all (key, model, URL or quota).
            BudgetExhausted: a call might exceed the budget, and `when_exhausted` is "stop". Replies
                that arrived stay in the cache.
        """
        agents: dict[_TurnPosition, str] = {}
        tasks: dict[_TurnPosition, asyncio.Task[Judgement]] = {}
        for group_index, group in enumerate(groups):
            for trajectory_index, trajectory in enumerate(group.trajectories):
                for turn_index, turn in enumerate(trajectory.turns):
                    if self._is_judged(trajectory, turn):
                        position = (group_index, trajectory_index, turn_index)
                        messages = coach_messages(group.task, trajectory, turn, self._config)
                        agents[position] = turn.agent
                        tasks[position] = asyncio.create_task(self._judge(turn, messages))

        judgements = await self._wait_for_judgements(tasks)
        scores: dict[_TurnPosition, dict[str, float]] = {}
        for position, judgement in judgements.items():
            scores[position] = self._record(agents[position], judgement)

        failures = [value for value in judgements.values() if isinstance(value, Unscored)]
        for failure in failures:
            if failure.kind == "budget" and self._config.when_exhausted == "stop":
                raise BudgetExhausted(
                    f"coach: {failure.message}; raise coach.budget to continue, replies so far are "
                    "kept"
                )
        return _merge_scores(groups, scores)

    def metrics(self) -> dict[str, float]:
        """Return failures by kind and metrics by agent since the last call, and the spending of the run so far."""
        statistics = self._statistics
        failures_by_kind = self._failures_by_kind
        self._statistics = defaultdict(_AgentStatistics)
        self._failures_by_kind = Counter()

        metrics: dict[str, float] = {
            f"failed_{kind}": failures for kind, failures in sorted(failures_by_kind.items())
        }
        for agent, agent_statistics in sorted(statistics.items()):
            for name, value in agent_statistics.tally.metrics().items():
                metrics[f"{agent}/{name}"] = value
            metrics[f"{agent}/failures"] = agent_statistics.failures
            if agent_statistics.process_scores:
                metrics[f"{agent}/process_mean"] = fmean(agent_statistics.process_scores)
        spent = self._caller.spent
        metrics["spent_calls"] = spent.calls
        metrics["spent_tokens"] = spent.tokens
        metrics["spent_cost"] = spent.cost_nanos / 1e9
        return {f"coach/{name}": float(value) for name, value in metrics.items()}

    async def aclose(self) -> None:
        """Close the connections and the cache."""
        await self._caller.aclose()

    def _is_judged(self, trajectory: Trajectory, turn: Turn) -> bool:
        if trajectory.status is not Status.COMPLETED or turn.masked:
            # A masked turn, such as that of a frozen agent, does not train.
            return False
        return not self._config.agents or turn.agent in self._config.agents

    async def _wait_for_judgements(
        self, tasks: Mapping[_TurnPosition, asyncio.Task[Judgement]]
    ) -> dict[_TurnPosition, Judgement]:
        """Return the judgements of a batch; those that exceed the batch's deadline are `Unscored`.

        If a task raises, all others are cancelled, and its error is raised.
        """
        if not tasks:
            return {}
        batch_deadline_s = self._config.batch_deadline_s
        try:
            done, _ = await asyncio.wait(
                tasks.values(), timeout=batch_deadline_s, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            await cancel_tasks(tasks.values())
        late = Unscored(
            kind="deadline", message=f"the batch took longer than {batch_deadline_s:g} s"
        )
        return {
            position: task.result() if task in done else late for position, task in tasks.items()
        }

    async def _judge(self, turn: Turn, messages: tuple[Message, ...]) -> Judgement:
        """Request a verdict on a turn, and a second time if the first one is malformed.

        If there is no valid verdict, return the reason as Unscored.

        Raises:
            RemoteError: the model cannot be used at all.
        """
        require_own_answer = requires_own_answer(turn, self._config)
        try:
            async with self._caller.slot() as deadline:
                reply = await self._ask(turn.agent, messages, deadline)
                try:
                    return parse_verdict(reply, require_own_answer=require_own_answer)
                except MalformedVerdict as error:
                    problem = str(error)
                messages = repair_messages(messages, reply, problem, turn=turn, config=self._config)
                reply = await self._ask(turn.agent, messages, deadline)
                return parse_verdict(reply, require_own_answer=require_own_answer)
        except TimeoutError:
            message = f"no verdict within {self._config.deadline_s:g} s"
            return Unscored(kind="deadline", message=message)
        except BudgetExhausted as error:
            return Unscored(kind="budget", message=str(error))
        except MalformedVerdict as error:
            return Unscored(kind="malformed", message=f"{error}, also when asked again")
        except Refused as error:
            return Unscored(kind="refused", message=str(error))
        except Unanswered as error:
            return Unscored(kind="unavailable", message=str(error))

    async def _ask(self, agent: str, messages: tuple[Message, ...], deadline: float) -> str:
        tally = self._statistics[agent].tally
        answer = await self._caller.ask(agent, messages, self._settings, tally, deadline=deadline)
        return answer.text

    def _record(self, agent: str, judgement: Judgement) -> dict[str, float]:
        """Add a judgement to the statistics of the agent; return the scores of the turn."""
        statistics = self._statistics[agent]
        if not isinstance(judgement, Unscored):
            statistics.process_scores.append(judgement["process"])
            return judgement
        statistics.failures += 1
        self._failures_by_kind[judgement.kind] += 1
        self.last_failure = judgement.message
        if self._config.fallback is None:
            return {}
        return {"process": self._config.fallback}


def _merge_scores(
    groups: Sequence[Group], scores: Mapping[_TurnPosition, Mapping[str, float]]
) -> list[Group]:
    """Return the groups with these scores merged into the scores of their turns, by name."""
    result = []
    for group_index, group in enumerate(groups):
        trajectories = []
        for trajectory_index, trajectory in enumerate(group.trajectories):
            turns = []
            for turn_index, turn in enumerate(trajectory.turns):
                turn_scores = scores.get((group_index, trajectory_index, turn_index), {})
                turns.append(replace(turn, scores={**turn.scores, **turn_scores}))
            trajectories.append(replace(trajectory, turns=tuple(turns)))
        result.append(replace(group, trajectories=tuple(trajectories)))
    return result
