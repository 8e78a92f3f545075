"""Random agent programs at a gateway with a tiny model, and an account of every sampled token.

`python -m tests.support.gateway_fuzz 1000` plays a thousand sessions.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from rollout.engines import TokenCallback
from rollout.records.trajectory import Completion, Sampling, Turn
from tests.support.gateway import open_session, sampling_team

# prompt, completion and log-probabilities
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
_CONCURRENT_SESSIONS = 24
_TOOLS = [
    {"name": "f", "description": "ö" * 5, "parameters": {"type": "object", "properties": {"x": {}}}}
]


@dataclass(slots=True)
class Report:
    """Results of all sessions.

    Attributes:
        statuses: number of HTTP responses by status.
        turns: recorded turns.
        unaccounted: completions without a turn, and turns without a completion.
        moves: number of moves by name.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    turns: list[Turn] = field(default_factory=list)
    unaccounted: list[Row] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)


class Recorder:
    """An engine that counts the completions that it returns."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.completions: Counter[Row] = Counter()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion: Completion = await self._engine.generate(prompt_ids, sampling)
        self.completions[tuple(prompt_ids), completion.token_ids, completion.logprobs] += 1
        return completion

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        completion: Completion = await self._engine.stream(prompt_ids, sampling, on_tokens)
        self.completions[tuple(prompt_ids), completion.token_ids, completion.logprobs] += 1
        return completion


class Player:
    """An agent program that makes random calls, valid and invalid ones."""

    def __init__(
        self, http: httpx.AsyncClient, url: str, key: str, report: Report, seed: int
    ) -> None:
        self._http = http
        self._url = url
        self._report = report
        self._headers = {"Authorization": f"Bearer {key}"}
        self._random = random.Random(seed)
        self._chats: list[list[dict[str, Any]]] = []

    async def play(self) -> None:
        for _ in range(self._random.randint(2, 6)):
            move = self._random.choice(_MOVES)
            self._report.moves[move] += 1
            await getattr(self, move)()

    async def _post(
        self, path: str, content: bytes, timeout_s: float = 60.0, **headers: str
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._http.post(
                    self._url + path, content=content, headers={**self._headers, **headers}
                )
        except TimeoutError:
            return {}
        self._report.statuses[reply.status_code] += 1
        is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
        body: dict[str, Any] = {} if is_stream else reply.json()
        return body

    async def _ask(
        self, messages: list[dict[str, Any]], timeout_s: float = 60.0, **fields: Any
    ) -> None:
        body = {"model": self._random.choice("ab"), "messages": messages, "max_tokens": 9, **fields}
        reply = await self._post("/v1/chat/completions", json.dumps(body).encode(), timeout_s)
        if "choices" in reply:
            self._chats.append([*messages, reply["choices"][0]["message"]])

    def _user(self) -> dict[str, Any]:
        characters = "ab \n'\"\\<|im_end|></think><tool_call>{}é\u2028\U0001f600\x00"
        return {
            "role": "user",
            "content": "".join(self._random.choices(characters, k=self._random.randint(0, 12))),
        }

    async def open_chat(self) -> None:
        tools = (
            [{"type": "function", "function": tool} for tool in _TOOLS]
            if self._random.random() < 0.5
            else None
        )
        await self._ask([self._user()], tools=tools)

    async def continue_chat(self) -> None:
        chat = self._random.choice(self._chats) if self._chats else []
        await self._ask([*chat, self._user()])

    async def rewrite(self) -> None:
        """Send a history with changed words, an invented tool call, or reformatted JSON."""
        chat = (
            [dict(message) for message in self._random.choice(self._chats)] if self._chats else []
        )
        function = {
            "name": "f",
            "arguments": self._random.choice(['{ "x" : [1,  2]}', "{}", "[1]", "{", "NaN"]),
        }
        invented_call = {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        if chat and self._random.random() < 0.5:
            chat[-1]["content"] = f"{chat[-1].get('content')}!"
        await self._ask(
            [
                *chat,
                invented_call,
                {"role": "tool", "tool_call_id": "c", "content": "é"},
                self._user(),
            ]
        )

    async def ask_concurrently(self) -> None:
        chat = self._random.choice(self._chats) if self._chats else []
        question = self._user()
        await asyncio.gather(
            *(self._ask([*chat, question]) for _ in range(self._random.randint(2, 4)))
        )

    async def leave(self) -> None:
        """Stop waiting for a call, and perhaps make it again."""
        messages = [self._user()]
        await self._ask(
            messages, self._random.choice([0.001, 0.01, 0.05]), stream=self._random.random() < 0.5
        )
        if self._random.random() < 0.5:
            await self._ask(messages)

    async def stream(self) -> None:
        body: dict[str, Any] = {"model": "a", "stream": True, "max_tokens": 5}
        calls = [("responses", {"input": "q"}), ("messages", {"messages": [self._user()]})]
        path, text = self._random.choice(
            [*calls, ("chat/completions", {"messages": [self._user()], "stop": ["a", "}}"]})]
        )
        await self._post(
            f"/v1/{path}", json.dumps({**body, **text}).encode(), self._random.choice([60.0, 0.01])
        )

    async def use_other_dialects(self) -> None:
        block = {
            "type": "tool_result",
            "tool_use_id": "nobody's",
            "content": [{"type": "text", "text": "1"}],
        }
        messages = {
            "model": "b",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": [block]}],
        }
        items = {
            "model": "b",
            "input": [{"type": "function_call_output", "call_id": "x", "output": "1"}],
        }
        path, body = self._random.choice([("messages", messages), ("responses", items)])
        await self._post(f"/v1/{path}", json.dumps(body).encode())

    async def send_invalid_calls(self) -> None:
        deep = '{"model": "a", "messages": [{"role": "user", "content": ' + "[" * 5000
        valid = json.dumps({"model": "a", "messages": [self._user()], "max_tokens": 1}).encode()
        huge = json.dumps(
            {"model": "a", "messages": [{"role": "user", "content": "x" * 20_000}]}
        ).encode()
        numbers = (
            b'{"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1'
            + b"0" * 5000
            + b"}"
        )
        bodies = [
            b"",
            b"{}",
            b"null",
            b"\xff",
            b'{"model": "\\ud800"}',
            deep.encode(),
            valid[:-1],
            huge,
            numbers,
        ]
        path = self._random.choice(
            ["chat/completions", "responses", "messages", "nowhere", "../.."]
        )
        headers = (
            {}
            if self._random.random() < 0.8
            else {"Authorization": self._random.choice(["", "Bearer é", "x"])}
        )
        await self._post(
            f"/v1/{path}",
            self._random.choice(bodies),
            **{k: v.encode() for k, v in headers.items()},
        )
        await self._post(
            "/v1/chat/completions",
            json.dumps({"model": "gpt-4", "messages": [self._user()]}).encode(),
        )
        await self._post(
            "/a/a/v1/messages", self._random.choice([b'{"model": "z", "messages": []}', b"7"])
        )


_MOVES = [name for name in vars(Player) if not name.startswith("_") and name != "play"]


async def fuzz(folder: Path, sessions: int, seed: int = 0) -> tuple[Report, Any]:
    """Play random programs concurrently; return a report, and Hugging Face's model of the weights."""
    team, engine, model = sampling_team(folder, max_tokens=12, max_length=1024)
    report = Report()
    slots = asyncio.Semaphore(_CONCURRENT_SESSIONS)
    recorder = Recorder(engine)
    client: Any = team.policies["p"]
    team = replace(team, policies={"p": replace(client, engine=recorder)})
    limits = httpx.Limits(max_connections=200)

    async def play_session(number: int) -> None:
        async with slots, open_session(team) as (url, key, team_session, session):
            await Player(http, url, key, report, seed * 10**6 + number).play()
            await session.close()
            report.turns += team_session.turns

    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as http:
        await asyncio.gather(*(play_session(number) for number in range(sessions)))
    recorded = Counter(
        (turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in report.turns
    )
    report.unaccounted = _unaccounted(recorder.completions, recorded)
    return report, model


def _unaccounted(sampled: Counter[Row], recorded: Counter[Row]) -> list[Row]:
    """Return completions without a turn and turns without a completion.

    A turn that ended at a stop has the first tokens of its completion.
    """
    without_turn = list((sampled - recorded).elements())
    without_completion: list[Row] = []
    for prompt, tokens, logprobs in (recorded - sampled).elements():
        size = len(tokens)
        for row in without_turn:
            if (row[0], row[1][:size], row[2][:size]) == (prompt, tokens, logprobs):
                without_turn.remove(row)
                break
        else:
            without_completion.append((prompt, tokens, logprobs))
    return without_turn + without_completion


@torch.no_grad()
def worst_logprob(model: Any, turns: Sequence[Turn]) -> float:
    """Return the largest relative error of the turns' log-probabilities against the model in float64."""
    model = model.double()
    errors = [0.0]
    for turn in turns:
        logits = model(torch.tensor([turn.prompt_ids + turn.completion_ids])).logits[
            0, len(turn.prompt_ids) - 1 : -1
        ]
        expected = (
            (logits / turn.temperature)
            .log_softmax(-1)
            .gather(-1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
        )
        error = (
            expected - torch.tensor(turn.logprobs, dtype=torch.float64)
        ).abs() / expected.abs().clamp(min=1.0)
        errors.append(float(error.max()))
    return max(errors)


def main() -> None:
    """Play the number of sessions that the command line gives, and print the report."""
    with tempfile.TemporaryDirectory() as folder:
        report, model = asyncio.run(fuzz(Path(folder), int(sys.argv[1])))
        worst = worst_logprob(model, report.turns)
    tokens = sum(len(turn.completion_ids) for turn in report.turns)
    print(
        f"moves: {dict(sorted(report.moves.items()))}; statuses: {dict(sorted(report.statuses.items()))}"
    )
    print(
        f"{len(report.turns)} turns, {tokens} tokens; unaccounted: {len(report.unaccounted)}; worst: {worst:.2g}"
    )
    sys.exit(bool(report.unaccounted) or max(report.statuses) >= 500 or worst > 1e-6)


if __name__ == "__main__":
    main()
