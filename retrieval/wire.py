"""Wire format of a retrieval server: limits and JSON shapes, shared by the server and the client.

`POST /retrieve` takes the requests of Search-R1 and verl (`queries`) and of Dr. MAS (`query`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
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

# dense: by the inner product of vectors; bm25: by the words of the query; hybrid: both fused.
Ranking = Literal["dense", "bm25", "hybrid"]

DEFAULT_TOPK = 3
MAX_TOPK = 100
MAX_REQUEST_QUERIES = 4096  # Search-R1's trainer sends all queries of a step in one request
MAX_REQUEST_PASSAGES = 40_960  # queries times topk
LARGE_ANSWER = 1000  # an answer with more passages is serialised in a thread
MAX_QUERY_CHARS = 2000
MAX_IDS = 256
MAX_AROUND = 5
MAX_BODY_BYTES = 1 << 20


class BadRequest(RetrievalError):
    """A request, or one of its queries, is invalid; sending it again cannot help."""


def _to_integer(value: Any) -> Any:
    """Convert 3.0 to 3, because JSON has only one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS, pattern=r"[^\x00-\x20]")]
# JSON null and 0 mean DEFAULT_TOPK.
Topk = Annotated[int, Field(ge=0, le=MAX_TOPK), BeforeValidator(_to_integer)] | None
# Unknown parameters are ignored, because clients of other servers send more of them.
_STRICT = ConfigDict(strict=True, frozen=True, extra="ignore")


class SearchRequest(BaseModel):
    """Body of `POST /retrieve`: `queries`, as Search-R1 sends, or one `query`, as Dr. MAS does."""

    model_config = _STRICT | {
        "json_schema_extra": {"oneOf": [{"required": ["queries"]}, {"required": ["query"]}]}
    }

    queries: Annotated[list[Query], Field(max_length=MAX_REQUEST_QUERIES)] = []
    query: Query = ""
    topk: Topk = None
    return_scores: bool = False

    @model_validator(mode="after")
    def _check(self) -> SearchRequest:
        if ("query" in self.model_fields_set) == ("queries" in self.model_fields_set):
            raise ValueError(
                'expected either queries, such as {"queries": ["..."], "topk": 3}, or one query'
            )
        passages = len(self.all_queries) * self.k
        if passages > MAX_REQUEST_PASSAGES:
            raise ValueError(
                f"queries times topk is {passages}, at most {MAX_REQUEST_PASSAGES}; "
                "ask in several requests"
            )
        return self

    @property
    def all_queries(self) -> list[str]:
        """List of queries, in whichever of the two forms they were sent."""
        return [self.query] if self.query else self.queries

    @property
    def k(self) -> int:
        """Passages for each query."""
        return self.topk or DEFAULT_TOPK


class PassagesRequest(BaseModel):
    """Body of `POST /passages`: ids, and the number of neighbours on each side of each passage."""

    model_config = _STRICT

    ids: Annotated[list[Query], Field(max_length=MAX_IDS)]
    around: Annotated[int, Field(ge=0, le=MAX_AROUND), BeforeValidator(_to_integer)] = 0


_QUERY: TypeAdapter[str] = TypeAdapter(Query, config=ConfigDict(strict=True))
_TOPK: TypeAdapter[int | None] = TypeAdapter(Topk, config=ConfigDict(strict=True))
_Request = TypeVar("_Request", bound=BaseModel)


def parse_request(request_type: type[_Request], body: bytes) -> _Request:
    """Parse the JSON body of a request; raise BadRequest if it is invalid.

    An empty list of queries is a valid request.
    """
    with _bad_request(""):
        return request_type.model_validate_json(body)


def check_query(query: str, name: str = "query") -> str:
    """Return the query; raise BadRequest with `name` if it is empty or too long."""
    with _bad_request(name):
        return _QUERY.validate_python(query)


def check_topk(topk: int | None) -> int:
    """Return `topk`, or DEFAULT_TOPK for None and 0; raise BadRequest above MAX_TOPK."""
    with _bad_request("topk"):
        return _TOPK.validate_python(topk) or DEFAULT_TOPK


@contextmanager
def _bad_request(name: str) -> Iterator[None]:
    """Raise the first error of a validation as BadRequest in one line.

    Args:
        name: name of the validated value, "" for a whole body.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        keys = [name, *map(str, first["loc"])]
        key = ".".join(filter(None, keys))
        raise BadRequest(f"{key}: {first['msg']}" if key else first["msg"]) from None


def openapi() -> dict[str, Any]:
    """Return the server's OpenAPI document: openapi.yaml and the schemas of the requests."""
    text = Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    requests: list[type[BaseModel]] = [SearchRequest, PassagesRequest]
    _, schemas = models_json_schema(
        [(request, "validation") for request in requests],
        ref_template="#/components/schemas/{model}",
    )
    return {**document, "components": {"schemas": schemas["$defs"]}}


def render_response(results: Sequence[Sequence[Passage]], return_scores: bool) -> dict[str, Any]:
    """Return the body of an answer: in `result` a list of passages for each query or id.

    A passage is its document; with `return_scores`, an object with `document` and `score`.
    """

    def render(passage: Passage) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if return_scores else document

    return {"result": [[render(passage) for passage in passages] for passages in results]}


def parse_response(body: bytes, query_count: int, topk: int) -> list[list[Passage]]:
    """Return the passages of each query, best first, from an answer with scores.

    Args:
        body: JSON of the answer.
        query_count: number of queries in the request.
        topk: maximum number of passages for each query.

    Raises:
        ValueError: the answer has another shape, or a score is not finite.
    """
    match json.loads(body):
        case {"result": list(rows)} if len(rows) == query_count:
            return [_parse_row(row, topk) for row in rows]
    raise ValueError(f"expected 'result' with {query_count} rows")


def _parse_row(row: object, topk: int) -> list[Passage]:
    if not isinstance(row, list) or not 1 <= len(row) <= topk:
        raise ValueError(f"expected 1 to {topk} passages for each query")
    passages = []
    for item in row:
        match item:
            case {
                "document": {"id": str(id), "contents": str(contents)},
                "score": float() | int() as score,
            } if math.isfinite(score):
                passages.append(Passage(id=id, contents=contents, score=float(score)))
            case _:
                raise ValueError(
                    "expected each passage as {'document': {'id', 'contents'}, 'score'} "
                    "with a finite score"
                )
    return passages


def parse_passages(body: bytes) -> list[Passage]:
    """Return the passages in an answer of /passages to one id; raise ValueError if malformed."""
    match json.loads(body):
        case {"result": [list(row)]}:
            return [Passage(id=str(item["id"]), contents=str(item["contents"])) for item in row]
    raise ValueError("expected 'result' with one row")
