"""Other people's clients and a fuzzer against the server: the requests they send, and the answers they walk."""

import json
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as known

from retrieval.corpus import Passage

JSON = {"Content-Type": "application/json", "Accept": "application/json"}
CHECKS = [
    not_a_server_error,
    known.status_code_conformance,
    known.content_type_conformance,
    known.response_schema_conformance,
    known.negative_data_rejection,
    known.positive_data_acceptance,
]


def shown(row: list[Any]) -> str:
    """What Search-R1 shows its model of a query's passages."""
    text = ""
    for place, item in enumerate(row):
        content = item["document"]["contents"]
        text += f"Doc {place + 1}(Title: {content.split(chr(10))[0]}) {chr(10).join(content.split(chr(10))[1:])}\n"
    return text


def test_search_r1_sends_all_queries_of_a_step_at_once(
    server_url: str, passages: list[Passage]
) -> None:
    """`_batch_search` of its `generation.py`, and its `retrieval_request.py` with 400 queries; no status is checked."""
    asked = [passage.title for passage in passages] * 80
    payload = {"queries": asked, "topk": 3, "return_scores": True}
    rows = requests.post(f"{server_url}/retrieve", json=payload).json()["result"]  # as they do
    assert [row[0]["document"]["id"] for row in rows] == ["0", "1", "2", "3", "4"] * 80
    assert shown(rows[0]).startswith(
        f'Doc 1(Title: "Alice Walker") {passages[0].text}\nDoc 2(Title: '
    )


def test_verl_sends_the_queries_of_one_call(server_url: str) -> None:
    """`call_search_api` of `search_r1_like_utils.py`: status and `result` are looked at, then each document."""
    payload = {"queries": ["Hugo Brandt", "Iron Bridge"], "topk": 2, "return_scores": True}
    reply = requests.post(f"{server_url}/retrieve", headers=JSON, json=payload, timeout=30)
    reply.raise_for_status()
    assert [
        [item["document"]["contents"].split("\n")[0] for item in row][:1]
        for row in reply.json()["result"]
    ] == [
        ['"Hugo Brandt"'],
        ['"Iron Bridge"'],
    ]


def test_drmas_sends_one_query_under_another_name(server_url: str, passages: list[Passage]) -> None:
    """`call_search_api` of its SkyRL gym over a session; its server answers one row, of bare documents by default."""
    with requests.Session() as session:
        session.mount(
            "http://",
            requests.adapters.HTTPAdapter(pool_connections=2, pool_maxsize=2, max_retries=0),
        )
        payload = {"query": "Clara Dawson", "topk": 3, "return_scores": True}
        reply = session.post(f"{server_url}/retrieve", headers=JSON, json=payload, timeout=30)
        reply.raise_for_status()
        (row,) = reply.json()["result"]
        assert (len(row), row[0]["document"]["contents"].strip()) == (3, passages[4].contents)
        bare = session.post(
            f"{server_url}/retrieve", headers=JSON, json={"query": "Clara Dawson"}, timeout=30
        )
    assert [item["id"] for item in bare.json()["result"][0]] == [
        item["document"]["id"] for item in row
    ]


def test_a_fuzzer_with_the_document_finds_nothing(server_url: str) -> None:
    """schemathesis: requests that the document allows or forbids, over HTTP, each answer checked against it."""
    schema = schemathesis.openapi.from_url(f"{server_url}/openapi.json")
    asked = dict[str, int]()
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode, examples in (
            (schemathesis.GenerationMode.POSITIVE, 25),
            (schemathesis.GenerationMode.NEGATIVE, 25),
        ):
            if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
                continue

            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                reply = case.call(timeout=30)
                asked[str(reply.status_code)] = asked.get(str(reply.status_code), 0) + 1
                case.validate_response(reply, checks=CHECKS)

            ask()
    assert asked["200"] > 50, asked
    assert asked["422"] > 20, asked
    assert set(asked) <= {"200", "413", "422"}, json.dumps(asked)
