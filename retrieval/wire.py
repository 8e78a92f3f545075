"""Wire format of `POST /retrieve`: limits and JSON shapes, shared by the server and the client."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mcore_mas.retrieval.corpus import Passage, RetrievalError

Ranking = Literal["dense", "bm25", "hybrid"]  # by vectors, by words, or both fused

DEFAULT_TOPK = 3
MAX_TOPK = 100
MAX_REQUEST_QUERIES = 256
MAX_QUERY_CHARS = 2000
MAX_AROUND = 5
MAX_BODY_BYTES = 1 << 20


class BadRequest(RetrievalError):
    """A request, or one query in it, that no retry can make right."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A valid request: up to MAX_REQUEST_QUERIES queries, `topk` passages for each."""

    queries: list[str]
    topk: int
    return_scores: bool


def check_query(query: object, where: str = "query") -> str:
    """The query itself, or BadRequest naming `where` and what is wrong with it."""
    if not isinstance(query, str):
        raise BadRequest(f"{where} is a {type(query).__name__}, expected a string")
    if not query.strip():
        raise BadRequest(f"{where} is empty")
    if len(query) > MAX_QUERY_CHARS:
        raise BadRequest(f"{where} has {len(query)} characters, at most {MAX_QUERY_CHARS} are taken")
    try:
        query.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{where} is not valid Unicode (a lone surrogate)") from None
    return query


def check_topk(topk: object) -> int:
    """`topk` with null and 0 read as the default; BadRequest outside 1..MAX_TOPK."""
    if topk is None or (topk == 0 and type(topk) is int):
        return DEFAULT_TOPK
    if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
        raise BadRequest(f"topk is {topk!r}, expected an integer from 1 to {MAX_TOPK}, or null or 0 for {DEFAULT_TOPK}")
    return topk


def parse_request(body: bytes) -> SearchRequest:
    """The request in a JSON body; raises BadRequest. An empty list of queries is a valid request."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("queries"), list):
        raise BadRequest('the body is not an object like {"queries": ["..."], "topk": 3, "return_scores": true}')
    queries = data["queries"]
    if len(queries) > MAX_REQUEST_QUERIES:
        raise BadRequest(f"{len(queries)} queries in one request, at most {MAX_REQUEST_QUERIES} are taken")
    return_scores = data.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise BadRequest(f"return_scores is {return_scores!r}, expected true or false")
    return SearchRequest(
        queries=[check_query(query, f"queries[{i}]") for i, query in enumerate(queries)],
        topk=check_topk(data.get("topk")),
        return_scores=return_scores,
    )


def parse_ids(body: bytes) -> tuple[list[str], int]:
    """The ids of `{"ids": ["..."], "around": 0}`, and how many neighbours on each side; raises BadRequest."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("ids"), list):
        raise BadRequest('the body is not an object like {"ids": ["..."], "around": 0}')
    ids, around = data["ids"], data.get("around", 0)
    if len(ids) > MAX_REQUEST_QUERIES:
        raise BadRequest(f"{len(ids)} ids in one request, at most {MAX_REQUEST_QUERIES} are taken")
    if type(around) is not int or not 0 <= around <= MAX_AROUND:
        raise BadRequest(f"around is {around!r}, expected an integer from 0 to {MAX_AROUND}")
    return [check_query(id, f"ids[{i}]") for i, id in enumerate(ids)], around


def parse_passages(body: bytes) -> list[Passage]:
    """The passages in the reply for one id; raises ValueError on any other shape."""
    match json.loads(body):
        case {"result": [list(row)]}:
            return [Passage(id=str(item["id"]), contents=str(item["contents"])) for item in row]
    raise ValueError("expected 'result' with one row")


def render_response(results: Sequence[Sequence[Passage]], return_scores: bool) -> dict[str, Any]:
    """`{"result": [[...] per query]}`: documents wrapped with their score, or bare."""

    def render(passage: Passage) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if return_scores else document

    return {"result": [[render(passage) for passage in passages] for passages in results]}


def parse_response(body: bytes, queries: int, topk: int) -> list[list[Passage]]:
    """Passages per query, best first, from a reply with scores; raises ValueError on any other shape."""
    data = json.loads(body)
    rows = data.get("result") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) != queries:
        raise ValueError(f"expected 'result' with {queries} rows")
    return [_parse_row(row, topk) for row in rows]


def _parse_row(row: object, topk: int) -> list[Passage]:
    if not isinstance(row, list) or not 1 <= len(row) <= topk:
        raise ValueError(f"expected 1 to {topk} passages for each query")
    passages = []
    for item in row:
        match item:
            case {"document": {"id": str(id), "contents": str(contents)}, "score": float() | int() as score}:
                passages.append(Passage(id=id, contents=contents, score=float(score)))
            case _:
                raise ValueError("expected each passage as {'document': {'id', 'contents'}, 'score'}")
        if not math.isfinite(passages[-1].score or 0.0):
            raise ValueError("a score is not finite")
    return passages
