"""Coach (an LLM judge): a frozen external model that scores every turn of finished trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import Field

from rollout.base.async_tasks import cancel_tasks
from rollout.base.http import Refused, Unanswered
from rollout.base.yaml_files import read_yaml
from rollout.engines.remote import RemoteConfig, ReplySettings
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.ledger import BudgetExhausted
from rollout.records.trajectory import Group, Message, Status, Task, ToolEvent, Trajectory, Turn


class CoachConfig(RemoteConfig):
    """Who scores the agents' turns, and what it is shown."""

    agents: tuple[str, ...] = ()  # whose turns are scored; () is everyone's
    answers_for: tuple[str, ...] = ()  # whose turns are judged with the ground truth in sight
    metrics_for: tuple[
        str, ...
    ] = ()  # whose turns are judged with what the environment measured at the end
    outcome: bool = False  # ask for an outcome score too
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(1024, ge=1)  # of one verdict
    text_chars: int = Field(
        24000, ge=1
    )  # shown of the problem, of what the agent saw and wrote, of the ground truth
    observation_chars: int = Field(2000, ge=1)  # shown of each tool result of the turn
    earlier_chars: int = Field(500, ge=1)  # shown of each tool result before it
    batch_deadline_s: float = Field(1800.0, gt=0)  # of all turns of a step
    when_exhausted: Literal["stop", "mask"] = (
        "stop"  # the run stops and can go on, or turns stay without a score
    )
    fallback: float | None = Field(
        None, ge=0, le=10
    )  # score of a turn that could not be judged; None: no score


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why a turn has no verdict."""

    kind: str  # unavailable | refused | malformed | deadline | budget
    why: str


Judgement = dict[str, float] | Unscored  # a verdict's scores, by the names that turns carry


@dataclass(slots=True)
class _Judged:
    """What an agent's turns came to since the last `metrics`."""

    tally: Tally = field(default_factory=Tally)
    process: list[float] = field(default_factory=list)
    failures: int = 0


class Coach:
    """Scores turns. A turn it cannot score carries no score: nothing stands in for one unless `fallback` says so."""

    def __init__(self, config: CoachConfig, cache_folder: Path) -> None:
        """Read the key, and open the replies and the spending kept in `cache_folder`.

        Make it before child processes start: the key's variable is removed from this process's environment.
        """
        self._config, self._caller = config, Caller(config, cache_folder)
        self._settings = ReplySettings(temperature=config.temperature, max_tokens=config.max_tokens)
        self._judged: dict[str, _Judged] = defaultdict(_Judged)
        self._kinds: Counter[str] = Counter()
        self.exhausted = False  # the budget refused a call
        self.trouble = ""  # of the last turn without a verdict

    async def score(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups, with `scores["process"]` (and what else was asked) on the turns that could be judged.

        All turns of completed trajectories are judged side by side, `concurrency` at a time, each within `deadline_s`
        and all within `batch_deadline_s`.

        Raises:
            RemoteError: the coach cannot be used at all (key, model, URL, quota).
            BudgetExhausted: a call did not fit and `when_exhausted` is `stop`. Replies that came are kept.
        """
        judged = self._config.agents
        turns = [
            (group.task, played, turn)
            for group in groups
            for played in group.trajectories
            for turn in played.turns
        ]
        tasks = {
            place: asyncio.create_task(
                self._judge(turn.agent, question(task, trajectory, turn, self._config))
            )
            for place, (task, trajectory, turn) in enumerate(turns)
            # a masked turn, such as a frozen agent's, cannot train
            if trajectory.status is Status.COMPLETED
            and not turn.masked
            and (not judged or turn.agent in judged)
        }
        found = await self._gather(tasks)
        out = [f for f in found.values() if isinstance(f, Unscored) and f.kind == "budget"]
        self.exhausted = self.exhausted or bool(out)
        scores = {
            place: self._scores(turns[place][2].agent, verdict) for place, verdict in found.items()
        }
        if out and self._config.when_exhausted == "stop":
            raise BudgetExhausted(
                f"coach: {out[0].why}; raise coach.budget to go on, replies so far are kept"
            )
        new = (
            replace(turn, scores={**turn.scores, **scores.get(i, {})})
            for i, (_, _, turn) in enumerate(turns)
        )
        return [
            replace(
                g,
                trajectories=tuple(
                    replace(t, turns=tuple(islice(new, len(t.turns)))) for t in g.trajectories
                ),
            )
            for g in groups
        ]

    def metrics(self) -> dict[str, float]:
        """By agent since the last call of `metrics`, and what the coach has cost in all."""
        judged, self._judged = self._judged, defaultdict(_Judged)
        kinds, self._kinds = self._kinds, Counter()
        metrics: dict[str, float] = {
            f"failed_{kind}": count for kind, count in sorted(kinds.items())
        }
        for agent, own in sorted(judged.items()):
            asked = own.tally.metrics() | {"failures": own.failures}
            metrics |= {f"{agent}/{name}": value for name, value in asked.items()}
            if own.process:
                metrics[f"{agent}/process_mean"] = fmean(own.process)
        spent = self._caller.spent
        metrics |= {
            "spent_calls": spent.calls,
            "spent_tokens": spent.tokens,
            "spent_cost": spent.nanos / 1e9,
        }
        return {f"coach/{name}": float(value) for name, value in metrics.items()}

    async def aclose(self) -> None:
        """Close the connections and the cache."""
        await self._caller.aclose()

    async def _gather(self, tasks: dict[int, asyncio.Task[Judgement]]) -> dict[int, Judgement]:
        """What the tasks found, by place; those that are late are ended. One that raises ends them all."""
        if not tasks:
            return {}
        try:
            done, _ = await asyncio.wait(
                tasks.values(),
                timeout=self._config.batch_deadline_s,
                return_when=asyncio.FIRST_EXCEPTION,
            )
        finally:
            await cancel_tasks(tasks.values())
        late = Unscored(
            "deadline", f"the batch took longer than {self._config.batch_deadline_s:g} s"
        )
        return {place: task.result() if task in done else late for place, task in tasks.items()}

    async def _judge(self, agent: str, messages: tuple[Message, ...]) -> Judgement:
        try:
            async with self._caller.turn() as deadline:
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
        except Refused as trouble:
            return Unscored("refused", str(trouble))
        except Unanswered as trouble:
            return Unscored("unavailable", str(trouble))

    async def _ask(self, agent: str, messages: tuple[Message, ...], deadline: float) -> str:
        tally = self._judged[agent].tally
        return (
            await self._caller.ask(agent, messages, self._settings, tally, deadline=deadline)
        ).text

    def _scores(self, agent: str, found: Judgement) -> dict[str, float]:
        judged = self._judged[agent]
        if not isinstance(found, Unscored):
            judged.process.append(found["process"])
            return found
        judged.failures += 1
        self._kinds[found.kind] += 1
        self.trouble = found.why
        return {} if self._config.fallback is None else {"process": self._config.fallback}


FILES = "files"  # tool name of an event whose result lists the work folder, one file a line

_WORDS: Mapping[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"))


def question(
    task: Task, trajectory: Trajectory, turn: Turn, config: CoachConfig
) -> tuple[Message, ...]:
    """The conversation that asks for a verdict on `turn`."""
    shows_answers = turn.agent in config.answers_for
    body = _fenced(_sections(task, trajectory, turn, config))
    asked = [
        "verdict",
        *(["outcome"] if config.outcome else []),
        *(["correct"] if shows_answers else []),
    ]
    words = "\n".join(_WORDS[what] for what in asked)
    return (
        Message(role="system", content=_WORDS["system"]),
        Message(role="user", content=f"{body}\n\n{words}"),
    )


def ask_again(messages: tuple[Message, ...], reply: str, trouble: str) -> tuple[Message, ...]:
    """The same conversation, after a reply that could not be read."""
    return (
        *messages,
        Message(role="assistant", content=reply or "(nothing)"),  # vendors refuse empty messages
        Message(role="user", content=_WORDS["repair"].format(trouble=trouble)),
    )


def _sections(
    task: Task, trajectory: Trajectory, turn: Turn, config: CoachConfig
) -> list[tuple[str, str]]:
    events = [event for event in trajectory.tools if _seen(event, turn)]
    earlier = [e for e in events if e.after_turn < turn.index and e.tool != FILES]
    now = [e for e in events if e.after_turn == turn.index and e.tool != FILES]
    before, after = _files(events, turn.index - 1), _files(events, turn.index)
    sections = [("problem", clip(task.prompt, config.text_chars)), ("agent", turn.agent)]
    heard = "\n\n".join(f"{message.role}: {message.text}" for message in turn.messages)
    sections.append(("agent input", clip(heard, config.text_chars)))
    if before:
        sections.append(("files left by earlier turns", clip(before, config.observation_chars)))
    sections += [("earlier tool result", _result(e, config.earlier_chars)) for e in earlier]
    sections.append(("agent output", clip(turn.text, config.text_chars) or "(nothing)"))
    if turn.finish_reason == "length":
        sections.append(("note", "the output was cut off at the agent's limit of tokens"))
    sections += [("tool result", _result(e, config.observation_chars)) for e in now]
    if after and after != before:
        sections.append(("files after the action", clip(after, config.observation_chars)))
    if turn.agent in config.answers_for:
        sections.append(("ground truth", clip("\n".join(task.answers), config.text_chars)))
    if turn.agent in config.metrics_for:
        measured = {"outcome": trajectory.outcome or 0.0, **trajectory.metrics}
        sections.append(
            (
                "measured at the end",
                "\n".join(f"{name}: {value:.6g}" for name, value in measured.items()),
            )
        )
    return sections


def _seen(event: ToolEvent, turn: Turn) -> bool:
    """Whether an event lies on the turn's own line of the tree, up to the turn."""
    on_line = not event.node or f"{turn.node}.".startswith(f"{event.node}.")
    return on_line and event.after_turn <= turn.index


def _files(events: Iterable[ToolEvent], until: int) -> str:
    listed = [event.result for event in events if event.tool == FILES and event.after_turn <= until]
    return listed[-1] if listed else ""


def _result(event: ToolEvent, limit: int) -> str:
    return f"{event.tool}: {clip(event.query, limit)}\n{clip(event.result, limit)}"


def clip(text: str, limit: int) -> str:
    """At most about `limit` characters: the middle gives way, since results begin and errors end with what matters."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


def _fenced(sections: list[tuple[str, str]]) -> str:
    """Sections between markers that carry a digest of them all, which no text inside can foresee."""
    material = "\x1f".join(text for _, text in sections).encode(errors="surrogatepass")
    mark = hashlib.blake2b(material, digest_size=6).hexdigest()
    return "\n\n".join(
        f"[{name} {mark}]\n{text}\n[end of {name} {mark}]" for name, text in sections
    )


_LINE = re.compile(
    r"^[ \t>*_`#-]*(PROCESS_SCORE|OUTCOME_SCORE|ANSWER_CORRECT)[*_` \t]*[:=](.*)$", re.MULTILINE
)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_THOUGHTS = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


class Malformed(ValueError):
    """A reply without a usable score: says what is wrong with it."""


# name in a reply: name that turns carry, highest value
_SCORES = {
    "PROCESS_SCORE": ("process", 10.0),
    "OUTCOME_SCORE": ("outcome", 1.0),
    "ANSWER_CORRECT": ("answer_correct", 1.0),
}


def parse(reply: str) -> dict[str, float]:
    """Scores of a verdict: `process`, 0 (harmful) to 10 (as good as can be), and `outcome` (0 to 1) and
    `answer_correct` (0 or 1) if the reply has them.

    Reads `PROCESS_SCORE: x`, `OUTCOME_SCORE: x` and `ANSWER_CORRECT: 0|1`, each on its own line; scores are clamped to
    their ranges. A name may come twice if it says the same.

    Raises:
        Malformed: there is no process score, a value is no finite number, or two values of a name differ.
    """
    said: dict[str, str] = {}
    for name, value in _LINE.findall(_THOUGHTS.sub("", reply)):
        value = value.strip(" \t\r*_`").removesuffix(".")
        if said.setdefault(name, value) != value:
            raise Malformed(f"{name} is both {said[name]!r} and {value!r}")
    if "PROCESS_SCORE" not in said:
        raise Malformed("no line PROCESS_SCORE")
    if said.get("ANSWER_CORRECT") not in (None, "0", "1"):
        raise Malformed(f"ANSWER_CORRECT is {said['ANSWER_CORRECT'][:40]!r}, expected 0 or 1")
    said["PROCESS_SCORE"] = re.sub(r"\s*/\s*10$", "", said["PROCESS_SCORE"])
    return {
        key: _score(name, said[name], top) for name, (key, top) in _SCORES.items() if name in said
    }


def _score(name: str, text: str, top: float) -> float:
    """`text` as a number in [0, top]."""
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise Malformed(f"{name} is {text[:40]!r}, expected a number from 0 to {top:g}")
    return min(max(float(text), 0.0), top)
