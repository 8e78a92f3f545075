"""Several choices of a call, log-probabilities, seeds, stored replies, and fields without effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mcore_mas.training.metrics import describe_unheeded, rollout_metrics
from tests.support.gateway import exchange, open_session, sampling_team, scripted_team
from tests.support.played import group, trajectory, turn

HI: Any = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def test_choices_are_turns_of_one_prompt(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")
    (body,), turns = exchange(team, [(CHAT, {"model": "a", "messages": HI, "n": 3})])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert sorted(texts) == ["reply 0", "reply 1", "reply 2"]
    assert sorted(turn.text for turn in turns) == sorted(texts)
    assert {turn.prompt_ids for turn in turns} == {turns[0].prompt_ids}
    assert {turn.chat for turn in turns} == {"a/0", "a/1", "a/2"}
    assert body["usage"]["prompt_tokens"] == len(turns[0].prompt_ids)
    assert body["usage"]["completion_tokens"] == sum(len(t.completion_ids) for t in turns)


def test_each_choice_counts_as_a_call(tmp_path: Path) -> None:
    """Only the first of two choices is sampled, and it is not trained, because nobody reads it."""
    team, _ = scripted_team(tmp_path, lambda prompt, n: "x")

    async def run() -> Any:
        async with open_session(team, max_turns=1) as (url, key, team_session, _):
            async with httpx.AsyncClient(trust_env=False) as http:
                reply = await http.post(
                    f"{url}{CHAT}",
                    json={"model": "a", "messages": HI, "n": 2},
                    headers={"Authorization": f"Bearer {key}"},
                )
            while not team_session.turns:
                await asyncio.sleep(0.01)
        return reply.status_code, team_session.turns

    status, turns = asyncio.run(run())
    assert status == 403
    assert [(turn.masked, turn.scores["unread"]) for turn in turns] == [(True, 1.0)]


def test_log_probabilities_are_those_of_the_sampled_tokens(tmp_path: Path) -> None:
    team, _, _ = sampling_team(tmp_path, max_tokens=12)

    async def run() -> Any:
        async with (
            open_session(team) as (url, key, team_session, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api,
        ):
            chat = await api.chat.completions.create(
                model="a", messages=HI, logprobs=True, top_logprobs=3
            )
            chunks = [
                chunk
                async for chunk in await api.chat.completions.create(
                    model="a", messages=HI, logprobs=True, stream=True
                )
            ]
            response = await api.responses.create(
                model="a", input="hi", include=["message.output_text.logprobs"], top_logprobs=3
            )
        return chat, chunks, response, team_session.turns

    chat, chunks, response, turns = asyncio.run(run())
    streamed = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.logprobs:
                streamed += choice.logprobs.content
    token_lists = [
        chat.choices[0].logprobs.content,
        streamed,
        response.output[0].content[0].logprobs,
    ]
    for tokens, sampled in zip(token_lists, turns, strict=True):
        assert [token.logprob for token in tokens] == pytest.approx(list(sampled.logprobs))
        assert "".join(token.token for token in tokens).startswith(sampled.text)
    assert not any("unheeded/top_logprobs" in turn.scores for turn in turns)

    # The candidates are the likeliest tokens, and one that was sampled has its own log-probability.
    assert all(token.top_logprobs == [] for token in streamed)
    agreeing = 0
    for token in [*token_lists[0], *token_lists[2]]:
        values = [candidate.logprob for candidate in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        if token.logprob >= values[2]:
            assert any(value == pytest.approx(token.logprob, abs=1e-5) for value in values)
            agreeing += 1
        for candidate in token.top_logprobs:
            assert candidate.bytes == list(candidate.token.encode())
    assert agreeing > 0


def test_candidates_that_nobody_reports_are_counted(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "ok")
    body = {"model": "a", "messages": HI, "top_logprobs": 2}
    _, turns = exchange(team, [(CHAT, body), (CHAT, {**body, "logprobs": True})])
    assert [dict(turn.scores) for turn in turns] == [{"unheeded/top_logprobs": 1.0}] * 2


def test_a_stored_response_can_be_read_again(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")

    async def run() -> list[Any]:
        async with (
            open_session(team) as (url, key, _, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api,
        ):
            response = await api.responses.create(model="a", input="hi")
            again = await api.responses.retrieve(response.id)
            secret = await api.responses.create(model="a", input="hi", store=False)
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await api.responses.retrieve(secret.id)
            async with httpx.AsyncClient(trust_env=False) as http:
                stranger = await http.get(f"{url}/v1/responses/{response.id}")
            return [response.model_dump(), again.model_dump(), stranger.status_code]

    response, again, status = asyncio.run(run())
    assert response == again and status == 401


def test_fields_that_are_not_heeded_are_counted(tmp_path: Path) -> None:
    """Agent a samples at temperature 0.8 with top_p 0.95."""
    team, _ = scripted_team(tmp_path, lambda prompt, n: "x")
    hi = {"model": "a", "messages": HI}
    calls = [
        (CHAT, {**hi, "temperature": 0.8, "top_p": 0.95, "user": "u", "frequency_penalty": 0.0}),
        (CHAT, {**hi, "temperature": 0.7, "frequency_penalty": 0.5, "seed": 3}),
        ("/v1/messages", {**hi, "max_tokens": 9, "top_k": 5, "metadata": {"user_id": "u"}}),
    ]
    _, turns = exchange(team, calls)
    assert [sorted(turn.scores) for turn in turns] == [
        [],
        ["unheeded/frequency_penalty", "unheeded/seed", "unheeded/temperature"],
        ["unheeded/top_k"],
    ]


def test_a_line_names_each_field_once_in_a_run() -> None:
    scores = {"unheeded/seed": 1.0, "off_schema": 1.0}
    groups = [group(trajectory(turn(0, "a", scores=scores), turn(1, "a", scores=scores)))]
    metrics = rollout_metrics(groups)
    assert (metrics["gateway/unheeded/seed"], metrics["gateway/off_schema"]) == (2.0, 2.0)
    noted: set[str] = set()
    assert describe_unheeded(groups, noted) == (
        "calls of agent programs have parts that the gateway ignores: seed (docs/gateway.md; "
        "metrics gateway/unheeded/*)"
    )
    assert describe_unheeded(groups, noted) == ""


def test_a_seed_is_heeded_where_calls_set_their_sampling(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "x")
    call = (CHAT, {"model": "a", "messages": HI, "seed": 3})
    _, (sampled,) = exchange(team, [call], honor_sampling=True)
    assert "unheeded/seed" not in sampled.scores
