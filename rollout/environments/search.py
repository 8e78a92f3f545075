"""Search environment: open-book question answering with a retriever as tool."""

import re
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from pydantic import PositiveInt

from retrieval.client import BadRequest, NoRetriever, Passage, RetrievalError
from rollout.base.errors import EnvError, Unusable
from rollout.environments.protocol import Step, ToolCall, last_tag
from rollout.environments.text_scores import REWARDS, AnswerReward, normalise
from rollout.records.trajectory import Task

PassageStyle = Literal["search_r1", "verl", "text", "id"]
PASSAGE_STYLES: dict[PassageStyle, str] = {  # formats of one passage in an observation
    "search_r1": "Doc {rank}(Title: {title}) {text}\n",
    "verl": "Doc {rank} (Title: {title})\n{text}\n\n",
    "text": "{text}\n",
    "id": "[{id}] {title}: {text}\n",  # for agents with the tool `passages`
}

_READ_REQUEST = re.compile(r"(?P<id>.*?)(?: \+(?P<neighbours>[0-5]))?", re.DOTALL)
_MAX_QUERY_CHARS = 500  # retrievers refuse longer queries, which are failed generations


class Retriever(Protocol):
    """Client of a retriever, or an index in memory."""

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Return the best `k` passages for a query, best first.

        Raises:
            BadRequest: no retriever would take this query.
            RetrievalError: the retriever failed.
        """


@runtime_checkable
class PassageSource(Protocol):
    """A retriever that also finds passages by their ids."""

    async def passages(self, id: str, around: int) -> Sequence[Passage]:
        """Return the passage with this id and up to `around` neighbours on each side, in text order.

        Neighbours have the same title. The sequence is empty if no passage has this id.
        """


@dataclass(eq=False, kw_only=True)
class SearchEnv:
    """A question over one corpus, answered with a retriever's passages.

    A search without a query, or with one over 500 characters, finds nothing and is counted in the
    metric `invalid_searches`, as is a text without any tag; `searches` counts the other searches. The
    scores of an answer, `exact_match` and `token_f1`, are metrics, and one of them is the outcome. A
    trajectory without an answer has the outcome 0.

    Args:
        top_k: number of passages of a search.
        style: format of a passage in the observation: a number and the title before the text
            (Search-R1's `search_r1`, or `verl`); the `text` alone; or the `id`, the title and the
            text, for agents with the tool `passages`.
        reward: score of the answer that becomes the outcome: `exact_match` or `token_f1`.
    """

    task: Task = field(kw_only=False)
    retriever: Retriever
    top_k: PositiveInt = 3
    style: PassageStyle = "search_r1"
    reward: AnswerReward = "exact_match"
    _searches: int = field(default=0, init=False)
    _invalid_searches: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        self.task = task
        self._searches = 0
        self._invalid_searches = 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Apply `<answer>…</answer>`, else `<search>…</search>`, else `<read>…</read>` of an id.

        A text without any of them is an invalid search.

        Raises:
            EnvError: the retriever failed, or has no passages by id; no model sees the message.
            Unusable: no retriever has answered for the seconds of the config's `retriever.patience_s`.
        """
        answer = last_tag(action, "answer")
        if answer is not None:
            return self._score(answer)

        query = last_tag(action, "search")
        read_request = last_tag(action, "read")
        if query is None and read_request:
            return await self._read(read_request)
        return await self._search(query)

    async def preview(self, action: str) -> Step:
        return await copy(self).step(action)

    async def _search(self, query: str | None) -> Step:
        passages = None
        if query and len(query) <= _MAX_QUERY_CHARS:
            passages = await self._retrieve(self.retriever.search, query, self.top_k)
        if query is None or passages is None:
            self._invalid_searches += 1
            return Step(
                observation="<information> </information>", answer="", metrics=self._counts()
            )

        self._searches += 1
        observation = f"<information> {''.join(passages).strip()} </information>"
        return Step(
            observation=observation,
            answer="",
            tools=(ToolCall(tool="search", query=query, result=observation),),
            passages=tuple(passage.strip() for passage in passages),
            metrics=self._counts(),
        )

    async def _read(self, request: str) -> Step:
        """Read the passage of a request `ID`, or `ID +N` with N neighbours on each side."""
        if not isinstance(self.retriever, PassageSource):
            raise EnvError(
                f"{type(self.retriever).__name__} has no passages by id; "
                "leave out the tool `passages`"
            )
        match = _READ_REQUEST.fullmatch(request)
        assert match is not None, "the pattern matches any text"
        neighbours = int(match["neighbours"] or 0)
        passages = await self._retrieve(self.retriever.passages, match["id"], neighbours)

        text = "".join(passages or ()).strip()
        observation = text or f"there is no passage {match['id']}"
        call = ToolCall(tool="read_passage", query=request, result=observation, failed=not text)
        return Step(observation=observation, answer="", tools=(call,), metrics=self._counts())

    async def _retrieve(
        self,
        find: Callable[[str, int], Awaitable[Sequence[Passage]]],
        query_or_id: str,
        count: int,
    ) -> list[str] | None:
        """Return formatted passages; None if no retriever would take the query or id.

        Args:
            find: `search` of the retriever, or its `passages`.
            query_or_id: query of a search, or id of a passage.
            count: number of passages to find, or of neighbours on each side.

        Raises:
            EnvError, Unusable: see `step`.
        """
        try:
            passages = await find(query_or_id, count)
        except BadRequest:
            return None
        except NoRetriever as error:
            raise Unusable(
                f"{error}; start the retriever, then start the run again, which resumes"
            ) from error
        except RetrievalError as error:
            raise EnvError(f"the retriever failed: {error}") from error

        style = PASSAGE_STYLES[self.style]
        return [
            style.format(
                rank=rank, id=getattr(passage, "id", ""), title=passage.title, text=passage.text
            )
            for rank, passage in enumerate(passages, start=1)
        ]

    def _score(self, answer: str) -> Step:
        """Score an answer and end the trajectory."""
        scores = {name: score(answer, self.task.answers) for name, score in REWARDS.items()}
        return Step(
            reward=scores[self.reward],
            done=True,
            answer=normalise(answer),
            metrics=self._counts() | scores,
        )

    def _counts(self) -> dict[str, float]:
        return {
            "searches": float(self._searches),
            "invalid_searches": float(self._invalid_searches),
        }
