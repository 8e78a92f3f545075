"""Wire format of `POST /retrieve`: limits and JSON shapes, shared by the server and the client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import models_json_schema

from retrieval.corpus import Passage, RetrievalError
from rollout.base.files import read_yaml

Ranking = Literal["dense", "bm25", "hybrid"]  # by vectors, by words, or both fused

DEFAULT_TOPK = 3
MAX_TOPK = 100
MAX_REQUEST_QUERIES = 4096  # Search-R1's trainer sends all of a step in one request
MAX_REQUEST_PASSAGES = 40_960  # that one request may be answered with: queries times topk
LARGE_ANSWER = 1000  # passages, whose JSON takes so long to write that others would wait for it
MAX_QUERY_CHARS = 2000
MAX_IDS = 256
MAX_NAMES, MAX_VALUES = 8, 64  # of a filter
MAX_AROUND = 5
MAX_BODY_BYTES = 1 << 20


class BadRequest(RetrievalError):
    """A request, or one query in it, that no retry can make right."""


Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS, pattern=r"[^\x00-\x20]")]
# JSON has one kind of number, in which 3.0 is an integer
_WHOLE = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
Topk = Annotated[int, Field(ge=0, le=MAX_TOPK), _WHOLE] | None  # null and 0 are DEFAULT_TOPK
_LIMITS = ConfigDict(
    strict=True, frozen=True, extra="ignore"
)  # other servers have parameters of their own

_Value = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
_Values = _Value | Annotated[list[_Value], Field(min_length=1, max_length=MAX_VALUES)]
# by name the value of a passage's title, or of what its line says besides; of several values it has one
Conditions = Annotated[dict[_Value, _Values], Field(max_length=MAX_NAMES)]
Where = tuple[tuple[str, tuple[str, ...]], ...]  # as can be compared: (name, values) in order


class SearchRequest(BaseModel):
    """`POST /retrieve`: passages for each of `queries`, as Search-R1 asks, or for one `query`, as Dr.MAS does."""

    model_config = _LIMITS | {
        "json_schema_extra": {"oneOf": [{"required": ["queries"]}, {"required": ["query"]}]}
    }

    queries: Annotated[list[Query], Field(max_length=MAX_REQUEST_QUERIES)] = []
    query: Query = ""
    topk: Topk = None
    return_scores: bool = False
    where: Conditions = {}

    @model_validator(mode="after")
    def _asks(self) -> SearchRequest:
        if ("query" in self.model_fields_set) == ("queries" in self.model_fields_set):
            raise ValueError(
                'expected either queries, such as {"queries": ["..."], "topk": 3}, or one query'
            )
        if (most := len(self.asked) * self.most) > MAX_REQUEST_PASSAGES:
            raise ValueError(
                f"queries times topk is {most}, at most {MAX_REQUEST_PASSAGES}; ask in several requests"
            )
        return self

    @property
    def asked(self) -> list[str]:
        """All queries."""
        return [self.query] if self.query else self.queries

    @property
    def most(self) -> int:
        """Passages for each."""
        return self.topk or DEFAULT_TOPK


class PassagesRequest(BaseModel):
    """`POST /passages`: passages by their ids, each with `around` neighbours of its title on each side."""

    model_config = _LIMITS

    ids: Annotated[list[Query], Field(max_length=MAX_IDS)]
    around: Annotated[int, Field(ge=0, le=MAX_AROUND), _WHOLE] = 0


_Kind = TypeVar("_Kind", bound=BaseModel)


def parse_request(kind: type[_Kind], body: bytes) -> _Kind:
    """The request in a JSON body; raises BadRequest. An empty list of queries is a valid request."""
    with _named(""):
        return kind.model_validate_json(body)


def check_query(query: str, what: str = "query") -> str:
    """The query itself; raises BadRequest that names `what` and what is wrong with it."""
    with _named(what):
        return _QUERY.validate_python(query)


def check_topk(topk: int | None) -> int:
    """`topk` with null and 0 read as the default; raises BadRequest outside 1..MAX_TOPK."""
    with _named("topk"):
        return _TOPK.validate_python(topk) or DEFAULT_TOPK


def check_where(where: Mapping[str, str | list[str]] | None) -> Where:
    """A filter as can be compared; raises BadRequest."""
    with _named("where"):
        checked = _WHERE.validate_python(where or {})
    return tuple(
        (name, tuple(sorted({values} if isinstance(values, str) else values)))
        for name, values in sorted(checked.items())
    )


_QUERY: TypeAdapter[str] = TypeAdapter(Query, config=ConfigDict(strict=True))
_WHERE: TypeAdapter[dict[str, Any]] = TypeAdapter(Conditions, config=ConfigDict(strict=True))
_TOPK: TypeAdapter[int | None] = TypeAdapter(Topk, config=ConfigDict(strict=True))


@contextmanager
def _named(what: str) -> Iterator[None]:
    """The first thing that is wrong with a request, as one line."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(filter(None, [what, *map(str, first["loc"])]))
        raise BadRequest(": ".join(filter(None, [place, first["msg"]]))) from None


def openapi() -> dict[str, Any]:
    """The server's OpenAPI document: that of openapi.yaml, with the schemas of the requests."""
    document: dict[str, Any] = read_yaml(Path(__file__).with_name("openapi.yaml"))
    requests: list[type[BaseModel]] = [SearchRequest, PassagesRequest]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in requests], ref_template="#/components/schemas/{model}"
    )
    return {**document, "components": {"schemas": schemas["$defs"]}}


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


def parse_response(body: bytes, queries: int, topk: int, least: int = 1) -> list[list[Passage]]:
    """Passages per query, best first, from a reply with scores; raises ValueError on any other shape."""
    match json.loads(body):
        case {"result": list(rows)} if len(rows) == queries:
            return [_parse_row(row, least, topk) for row in rows]
    raise ValueError(f"expected 'result' with {queries} rows")


def _parse_row(row: object, least: int, topk: int) -> list[Passage]:
    if not isinstance(row, list) or not least <= len(row) <= topk:
        raise ValueError(f"expected {least} to {topk} passages for each query")
    passages = []
    for item in row:
        match item:
            case {
                "document": {"id": str(id), "contents": str(contents)},
                "score": float() | int() as score,
            }:
                passages.append(Passage(id=id, contents=contents, score=float(score)))
            case _:
                raise ValueError(
                    "expected each passage as {'document': {'id', 'contents'}, 'score'}"
                )
        if not math.isfinite(passages[-1].score or 0.0):
            raise ValueError("a score is not finite")
    return passages
