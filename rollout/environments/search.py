"""Search environment (open-book question answering with a retriever as tool), scored by exact match or token F1."""

import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from pydantic import PositiveInt

from retrieval.client import BadRequest, NoRetriever, Passage, RetrievalError
from rollout.base.errors import EnvError, Unusable
from rollout.environments.protocol import Step, ToolCall, last_tag
from rollout.records.trajectory import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """`text` in lower case without ASCII punctuation, then without articles, with single spaces."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """1.0 when the normalised answer equals a normalised reference, else 0.0; an empty answer never matches."""
    got = normalise(answer)
    return float(bool(got) and any(got == normalise(reference) for reference in references))


def token_f1(answer: str, references: Iterable[str]) -> float:
    """The best F1 in [0, 1] of the answer's normalised words against a reference's, as bags of words."""
    got, *expected = (Counter(normalise(text).split()) for text in (answer, *references))
    # F1 = 2 P R / (P + R) with P = shared / |got|, R = shared / |expected|
    return max(
        (2 * (got & one).total() / max(got.total() + one.total(), 1) for one in expected),
        default=0.0,
    )


PassageStyle = Literal["search_r1", "verl", "text", "id"]
PASSAGE_STYLES: dict[PassageStyle, str] = {  # how one hit reads inside <information>
    "search_r1": "Doc {rank}(Title: {title}) {text}\n",
    "verl": "Doc {rank} (Title: {title})\n{text}\n\n",
    "text": "{text}\n",
    "id": "[{id}] {title}: {text}\n",  # for agents with the tool `passages`
}

AnswerReward = Literal["exact_match", "token_f1"]
REWARDS: dict[AnswerReward, Callable[[str, Iterable[str]], float]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
}

_WANTED = re.compile(r"(.*?)(?: \+([0-5]))?", re.DOTALL)  # a passage's id, and how many neighbours
_MAX_QUERY_CHARS = 500  # a longer one is a reply gone wrong, and retrievers refuse it


class Retriever(Protocol):
    """Whatever finds passages: the HTTP client, or an index in memory."""

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """The best `k` passages for `query`, best first.

        Raises:
            BadRequest: no retriever would take this query.
            RetrievalError: the retriever failed.
        """


@runtime_checkable
class PassageSource(Protocol):
    """A retriever that also knows passages by their ids."""

    async def passages(self, id: str, around: int) -> Sequence[Passage]:
        """Return the passage with this id and up to `around` neighbours on each side, if there is one."""


@dataclass(eq=False, kw_only=True)
class SearchEnv:
    """A question over one corpus, answered with a retriever's passages.

    A search with no query, or one over 500 characters, finds nothing and is counted in the metric `invalid_searches`.
    The outcome is `reward`; all of REWARDS are metrics. A trajectory that never answers has outcome 0.

    Args:
        top_k: passages a search.
        style: how they read, a key of PASSAGE_STYLES.
        reward: of an answer, a key of REWARDS.
    """

    task: Task = field(kw_only=False)
    retriever: Retriever
    top_k: PositiveInt = 3
    style: PassageStyle = "search_r1"
    reward: AnswerReward = "exact_match"
    _searches: int = field(default=0, init=False)
    _invalid: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        self.task, self._searches, self._invalid = task, 0, 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Apply `<answer>…</answer>`, else `<search>…</search>`, else `<read>…</read>` of a passage's id.

        Raises:
            EnvError: the retriever failed; nothing of its message reaches a model.
            Unusable: no retriever answers, and none did for as long as the run waits.
        """
        answer = last_tag(action, "answer")
        if answer is not None:
            return self._score(answer)
        query, wanted = last_tag(action, "search"), last_tag(action, "read")
        if query is None and wanted:
            return await self._read(wanted)
        if not query or len(query) > _MAX_QUERY_CHARS:
            return self._nothing()
        passages = await self._asked(self.retriever.search, query, self.top_k)
        if passages is None:
            return self._nothing()
        self._searches += 1
        observation = f"<information> {''.join(passages).strip()} </information>"
        call = ToolCall(tool="search", query=query, result=observation)
        shown = tuple(passage.strip() for passage in passages)
        return Step(
            observation=observation,
            answer="",
            tools=(call,),
            passages=shown,
            metrics=self._counts(),
        )

    def _source(self) -> PassageSource:
        if isinstance(self.retriever, PassageSource):
            return self.retriever
        raise EnvError(
            f"{type(self.retriever).__name__} has no passages by id; leave out the tool `passages`"
        )

    async def _read(self, wanted: str) -> Step:
        """`ID`, or `ID +N` with N neighbours on each side."""
        id, neighbours = _WANTED.fullmatch(wanted).groups("0")  # type: ignore[union-attr]  # it matches any text
        text = "".join(
            await self._asked(self._source().passages, id, int(neighbours)) or ()
        ).strip()
        shown = text or f"there is no passage {id}"
        call = ToolCall(tool="read_passage", query=wanted, result=shown, failed=not text)
        return Step(observation=shown, answer="", tools=(call,), metrics=self._counts())

    async def _asked(
        self, find: Callable[..., Awaitable[Sequence[Passage]]], *asked: object
    ) -> list[str] | None:
        """What the retriever finds, as it is shown; None where no retriever would take the question."""

        try:
            passages = await find(*asked)
        except BadRequest:
            return None
        except NoRetriever as failure:
            raise Unusable(
                f"{failure}; start it, and the run again, which goes on where it was"
            ) from failure
        except RetrievalError as failure:
            raise EnvError(f"the retriever failed: {failure}") from failure
        form = PASSAGE_STYLES[self.style].format
        return [
            form(rank=rank, id=getattr(passage, "id", ""), title=passage.title, text=passage.text)
            for rank, passage in enumerate(passages, start=1)
        ]

    async def preview(self, action: str) -> Step:
        return await copy(self).step(action)

    def _nothing(self) -> Step:
        self._invalid += 1
        return Step(observation="<information> </information>", answer="", metrics=self._counts())

    def _score(self, answer: str) -> Step:
        scores = {name: score(answer, self.task.answers) for name, score in REWARDS.items()}
        return Step(
            reward=scores[self.reward],
            done=True,
            answer=normalise(answer),
            metrics=self._counts() | scores,
        )

    def _counts(self) -> dict[str, float]:
        return {"searches": float(self._searches), "invalid_searches": float(self._invalid)}
