"""Coach (an LLM judge): a frozen external model that scores every turn of finished trajectories."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import Field

from rollout.base.http import Unanswered
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.ledger import BudgetExhausted
from rollout.engines.remote.protocol import CallRefused, RemoteConfig, ReplySettings
from rollout.records.trajectory import Group, Message, Status, Trajectory, Turn
from rollout.rewards.coach_questions import CoachVerdict, Malformed, View, ask_again, parse, question


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why a turn has no verdict."""

    kind: str  # unavailable | refused | malformed | deadline | budget
    why: str


TurnPlace = tuple[int, int, int]  # group, trajectory, turn: positions in what `score` was given
Judgement = CoachVerdict | Unscored


@dataclass(slots=True)
class _Judged:
    """What an agent's turns came to since the last `metrics`."""

    tally: Tally = field(default_factory=Tally)
    process: list[float] = field(default_factory=list)
    failures: int = 0


class Coach:
    """Scores turns. A turn it cannot score carries no score: nothing stands in for one unless `fallback` says so."""

    def __init__(self, config: CoachConfig, caller: Caller) -> None:
        self._config = config
        self._caller = caller
        self._settings = ReplySettings(temperature=config.temperature, max_tokens=config.max_tokens)
        self._view = View(
            outcome=config.outcome,
            answers_for=frozenset(config.answers_for),
            text_chars=config.text_chars,
            observation_chars=config.observation_chars,
            earlier_chars=config.earlier_chars,
        )
        self._judged: dict[str, _Judged] = defaultdict(_Judged)
        self._kinds: Counter[str] = Counter()
        self.exhausted = False  # the budget refused a call
        self.trouble = ""  # of the last turn without a verdict

    @classmethod
    def open(cls, config: CoachConfig, cache_folder: Path) -> Coach:
        """Read the key, and open the replies and the spending kept in `cache_folder`.

        Open it before child processes start: the key's variable is removed from this process's environment.

        Raises:
            RemoteError: no key, or a folder in use.
        """
        return cls(config, Caller(config, cache_folder))

    async def score(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups, with `scores["process"]` (and what else was asked) on the turns that could be judged.

        All turns of completed trajectories are judged side by side, `concurrency` at a time, each within `deadline_s`
        and all within `batch_deadline_s`.

        Raises:
            RemoteError: the coach cannot be used at all (key, model, URL, quota).
            BudgetExhausted: a call did not fit and `when_exhausted` is `stop`. Replies that came are kept.
        """
        asked = {place: turn for place, turn in _turns(groups) if self._is_judged(turn)}
        tasks = {
            place: asyncio.create_task(
                self._judge(turn.agent, question(groups[place[0]].task, _at(groups, place), turn, self._view))
            )
            for place, turn in asked.items()
        }
        found = await self._gather(tasks)
        out = [f for f in found.values() if isinstance(f, Unscored) and f.kind == "budget"]
        self.exhausted = self.exhausted or bool(out)
        scores = {place: self._scores(asked[place].agent, verdict) for place, verdict in found.items()}
        if out and self._config.when_exhausted == "stop":
            raise BudgetExhausted(f"coach: {out[0].why}; raise coach.budget to go on, replies so far are kept")
        return [_scored(g, group, scores) for g, group in enumerate(groups)]

    def metrics(self) -> dict[str, float]:
        """By agent since the last call of `metrics`, and what the coach has cost in all."""
        judged, self._judged = self._judged, defaultdict(_Judged)
        kinds, self._kinds = self._kinds, Counter()
        metrics = {f"coach/failed_{kind}": float(count) for kind, count in sorted(kinds.items())}
        for agent, own in sorted(judged.items()):
            tally, prefix = own.tally, f"coach/{agent}"
            metrics[f"{prefix}/calls"] = float(tally.calls)
            metrics[f"{prefix}/tokens"] = float(tally.tokens)
            metrics[f"{prefix}/cost"] = tally.nanos / 1e9
            metrics[f"{prefix}/failures"] = float(own.failures)
            metrics[f"{prefix}/cache_hits"] = float(tally.cache_hits)
            if tally.answers:
                metrics[f"{prefix}/latency_s"] = tally.seconds / tally.answers
            if own.process:
                metrics[f"{prefix}/process_mean"] = math.fsum(own.process) / len(own.process)
        spent = self._caller.spent
        metrics["coach/spent_calls"] = float(spent.calls)
        metrics["coach/spent_tokens"] = float(spent.tokens)
        metrics["coach/spent_cost"] = spent.nanos / 1e9
        return metrics

    async def aclose(self) -> None:
        """Close the connections and the cache."""
        await self._caller.aclose()

    async def __aenter__(self) -> Coach:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _is_judged(self, turn: Turn) -> bool:
        """Whether a turn can train (a frozen agent's cannot) and is to be judged."""
        return not turn.masked and (not self._config.agents or turn.agent in self._config.agents)

    async def _gather(self, tasks: dict[TurnPlace, asyncio.Task[Judgement]]) -> dict[TurnPlace, Judgement]:
        """What the tasks found; those that are late are ended. One that raises ends them all."""
        if not tasks:
            return {}
        try:
            done, _ = await asyncio.wait(
                tasks.values(), timeout=self._config.batch_deadline_s, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        late = Unscored("deadline", f"the batch took longer than {self._config.batch_deadline_s:g} s")
        return {place: task.result() if task in done else late for place, task in tasks.items()}

    async def _judge(self, agent: str, messages: tuple[Message, ...]) -> Judgement:
        async with self._caller.slots:
            deadline = time.monotonic() + self._config.deadline_s
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    reply = await self._ask(agent, messages, deadline)
                    try:
                        return parse(reply)
                    except Malformed as trouble:
                        messages = ask_again(messages, reply, str(trouble))
                    return parse(await self._ask(agent, messages, deadline))
            except TimeoutError:
                return Unscored("deadline", f"no verdict within {self._config.deadline_s:g} s")
            except BudgetExhausted as trouble:
                return Unscored("budget", str(trouble))
            except Malformed as trouble:
                return Unscored("malformed", f"{trouble}, also when asked again")
            except CallRefused as trouble:
                return Unscored("refused", str(trouble))
            except Unanswered as trouble:
                return Unscored("unavailable", str(trouble))

    async def _ask(self, agent: str, messages: tuple[Message, ...], deadline: float) -> str:
        tally = self._judged[agent].tally
        return (await self._caller.ask(agent, messages, self._settings, tally, deadline=deadline)).text

    def _scores(self, agent: str, found: Judgement) -> dict[str, float]:
        judged = self._judged[agent]
        if isinstance(found, CoachVerdict):
            judged.process.append(found.process)
            return found.scores()
        judged.failures += 1
        self._kinds[found.kind] += 1
        self.trouble = found.why
        return {} if self._config.fallback is None else {"process": self._config.fallback}


def _turns(groups: Sequence[Group]) -> Iterator[tuple[TurnPlace, Turn]]:
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group.trajectories):
            if trajectory.status is Status.COMPLETED:
                for i, turn in enumerate(trajectory.turns):
                    yield (g, t, i), turn


def _at(groups: Sequence[Group], place: TurnPlace) -> Trajectory:
    return groups[place[0]].trajectories[place[1]]


def _scored(g: int, group: Group, scores: dict[TurnPlace, dict[str, float]]) -> Group:
    return replace(
        group,
        trajectories=tuple(
            replace(
                trajectory,
                turns=tuple(
                    replace(turn, scores={**turn.scores, **scores[g, t, i]}) if scores.get((g, t, i)) else turn
                    for i, turn in enumerate(trajectory.turns)
                ),
            )
            for t, trajectory in enumerate(group.trajectories)
        ),
    )


class CoachConfig(RemoteConfig):
    """Who scores the agents' turns, and what it is shown."""

    agents: tuple[str, ...] = ()  # whose turns are scored; () is everyone's
    answers_for: tuple[str, ...] = ()  # whose turns are judged with the ground truth in sight
    outcome: bool = False  # ask for an outcome score too
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(1024, ge=1)  # of one verdict
    text_chars: int = Field(24000, ge=1)  # shown of the problem, of what the agent saw and wrote, of the ground truth
    observation_chars: int = Field(2000, ge=1)  # shown of each tool result of the turn
    earlier_chars: int = Field(500, ge=1)  # shown of each tool result before it
    batch_deadline_s: float = Field(1800.0, gt=0)  # of all turns of a step
    when_exhausted: Literal["stop", "mask"] = "stop"  # the run stops and can go on, or turns stay without a score
    fallback: float | None = Field(None, ge=0, le=10)  # score of a turn that could not be judged; None: no score
