"""Requests of the clients of Search-R1, verl and Dr. MAS, and a fuzzer of the OpenAPI document."""

from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as openapi_checks

from retrieval.corpus import Passage

JSON = {"Content-Type": "application/json", "Accept": "application/json"}
CHECKS = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.positive_data_acceptance,
]


def format_passages(row: list[Any]) -> str:
    """Format the passages of a query as Search-R1 shows them to its model."""
    text = ""
    for number, item in enumerate(row, start=1):
        title, _, body = item["document"]["contents"].partition("\n")
        text += f"Doc {number}(Title: {title}) {body}\n"
    return text


def test_search_r1_sends_all_queries_of_a_step_at_once(
    server_url: str, passages: list[Passage]
) -> None:
    """`_batch_search` of its `generation.py`, which does not check the status."""
    queries = [passage.title for passage in passages] * 80
    payload = {"queries": queries, "topk": 3, "return_scores": True}
    rows = requests.post(f"{server_url}/retrieve", json=payload).json()["result"]
    assert [row[0]["document"]["id"] for row in rows] == ["0", "1", "2", "3", "4"] * 80
    assert format_passages(rows[0]).startswith(
        f'Doc 1(Title: "Alice Walker") {passages[0].text}\nDoc 2(Title: '
    )


def test_verl_sends_the_queries_of_one_call(server_url: str) -> None:
    """`call_search_api` of its `search_r1_like_utils.py`."""
    payload = {"queries": ["Hugo Brandt", "Iron Bridge"], "topk": 2, "return_scores": True}
    reply = requests.post(f"{server_url}/retrieve", headers=JSON, json=payload, timeout=30)
    reply.raise_for_status()
    hugo, iron = reply.json()["result"]
    assert hugo[0]["document"]["contents"].startswith('"Hugo Brandt"\n')
    assert iron[0]["document"]["contents"].startswith('"Iron Bridge"\n')


def test_drmas_sends_one_query_under_another_name(server_url: str, passages: list[Passage]) -> None:
    """`call_search_api` of its SkyRL gym, over a session."""
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


@pytest.mark.slow
def test_a_fuzzer_of_the_document_finds_no_error(server_url: str) -> None:
    """Schemathesis sends requests that the document allows or forbids, and checks each answer."""
    schema = schemathesis.openapi.from_url(f"{server_url}/openapi.json")
    statuses = Counter[str]()
    for result in schema.get_all_operations():
        operation = result.ok()
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
                statuses[str(reply.status_code)] += 1
                case.validate_response(reply, checks=CHECKS)

            ask()
    assert statuses["200"] > 50
    assert statuses["422"] > 20
    assert set(statuses) <= {"200", "413", "422"}
