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

Row = tuple[
    tuple[int, ...], tuple[int, ...], tuple[float, ...]
]  # prompt, completion, log-probabilities
_AT_ONCE = 24  # sessions
_TOOLS = [
    {"name": "f", "description": "ö" * 5, "parameters": {"type": "object", "properties": {"x": {}}}}
]


@dataclass(slots=True)
class Report:
    """Statuses, turns and moves of all sessions."""

    statuses: Counter[int] = field(default_factory=Counter)
    turns: list[Turn] = field(default_factory=list)
    unaccounted: list[Row] = field(
        default_factory=list
    )  # completions without a turn, and turns without a completion
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
        self, prompt_ids: Sequence[int], sampling: Sampling, hear: TokenCallback | None
    ) -> Completion:
        completion: Completion = await self._engine.stream(prompt_ids, sampling, hear)
        self.completions[tuple(prompt_ids), completion.token_ids, completion.logprobs] += 1
        return completion


class Player:
    """An agent program that makes random calls, valid and invalid ones."""

    def __init__(
        self, http: httpx.AsyncClient, url: str, key: str, report: Report, seed: int
    ) -> None:
        self._http, self._url, self._report = http, url, report
        self._head = {"Authorization": f"Bearer {key}"}
        self._random = random.Random(seed)
        self._chats: list[list[dict[str, Any]]] = []

    async def play(self) -> None:
        for _ in range(self._random.randint(2, 6)):
            move = self._random.choice(_MOVES)
            self._report.moves[move] += 1
            await getattr(self, move)()

    async def _post(
        self, path: str, content: bytes, patience_s: float = 60.0, **head: str
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(patience_s):
                reply = await self._http.post(
                    self._url + path, content=content, headers={**self._head, **head}
                )
        except TimeoutError:
            return {}
        self._report.statuses[reply.status_code] += 1
        streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        found: dict[str, Any] = {} if streamed else reply.json()
        return found

    async def _ask(
        self, messages: list[dict[str, Any]], patience_s: float = 60.0, **more: Any
    ) -> None:
        body = {"model": self._random.choice("ab"), "messages": messages, "max_tokens": 9, **more}
        reply = await self._post("/v1/chat/completions", json.dumps(body).encode(), patience_s)
        if "choices" in reply:
            self._chats.append([*messages, reply["choices"][0]["message"]])

    def _user(self) -> dict[str, Any]:
        signs = "ab \n'\"\\<|im_end|></think><tool_call>{}é\u2028\U0001f600\x00"
        return {
            "role": "user",
            "content": "".join(self._random.choices(signs, k=self._random.randint(0, 12))),
        }

    async def fresh(self) -> None:
        tools = (
            [{"type": "function", "function": tool} for tool in _TOOLS]
            if self._random.random() < 0.5
            else None
        )
        await self._ask([self._user()], tools=tools)

    async def goes_on(self) -> None:
        chat = self._random.choice(self._chats) if self._chats else []
        await self._ask([*chat, self._user()])

    async def rewrites(self) -> None:
        """Send a history with changed words, an invented tool call, or reformatted JSON."""
        chat = (
            [dict(message) for message in self._random.choice(self._chats)] if self._chats else []
        )
        function = {
            "name": "f",
            "arguments": self._random.choice(['{ "x" : [1,  2]}', "{}", "[1]", "{", "NaN"]),
        }
        made_up = {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        if chat and self._random.random() < 0.5:
            chat[-1]["content"] = f"{chat[-1].get('content')}!"
        await self._ask(
            [*chat, made_up, {"role": "tool", "tool_call_id": "c", "content": "é"}, self._user()]
        )

    async def side_by_side(self) -> None:
        chat = self._random.choice(self._chats) if self._chats else []
        question = self._user()
        await asyncio.gather(
            *(self._ask([*chat, question]) for _ in range(self._random.randint(2, 4)))
        )

    async def leaves(self) -> None:
        """Leave a call before its reply, and perhaps make it again."""
        messages = [self._user()]
        await self._ask(
            messages, self._random.choice([0.001, 0.01, 0.05]), stream=self._random.random() < 0.5
        )
        if self._random.random() < 0.5:
            await self._ask(messages)

    async def streams(self) -> None:
        body: dict[str, Any] = {"model": "a", "stream": True, "max_tokens": 5}
        ways = [("responses", {"input": "q"}), ("messages", {"messages": [self._user()]})]
        path, text = self._random.choice(
            [*ways, ("chat/completions", {"messages": [self._user()], "stop": ["a", "}}"]})]
        )
        await self._post(
            f"/v1/{path}", json.dumps({**body, **text}).encode(), self._random.choice([60.0, 0.01])
        )

    async def other_dialects(self) -> None:
        block = {
            "type": "tool_result",
            "tool_use_id": "nobody's",
            "content": [{"type": "text", "text": "1"}],
        }
        said = {"model": "b", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        items = {
            "model": "b",
            "input": [{"type": "function_call_output", "call_id": "x", "output": "1"}],
        }
        path, body = self._random.choice([("messages", said), ("responses", items)])
        await self._post(f"/v1/{path}", json.dumps(body).encode())

    async def misbehaves(self) -> None:
        deep = '{"model": "a", "messages": [{"role": "user", "content": ' + "[" * 5000
        good = json.dumps({"model": "a", "messages": [self._user()], "max_tokens": 1}).encode()
        huge = json.dumps(
            {"model": "a", "messages": [{"role": "user", "content": "x" * 20_000}]}
        ).encode()
        numbers = (
            b'{"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1'
            + b"0" * 5000
            + b"}"
        )
        wrong = [
            b"",
            b"{}",
            b"null",
            b"\xff",
            b'{"model": "\\ud800"}',
            deep.encode(),
            good[:-1],
            huge,
            numbers,
        ]
        path = self._random.choice(
            ["chat/completions", "responses", "messages", "nowhere", "../.."]
        )
        head = (
            {}
            if self._random.random() < 0.8
            else {"Authorization": self._random.choice(["", "Bearer é", "x"])}
        )
        await self._post(
            f"/v1/{path}", self._random.choice(wrong), **{k: v.encode() for k, v in head.items()}
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
    report, slots = Report(), asyncio.Semaphore(_AT_ONCE)
    recorder = Recorder(engine)
    client: Any = team.policies["p"]
    team = replace(team, policies={"p": replace(client, engine=recorder)})
    limits = httpx.Limits(max_connections=200)

    async def one(number: int) -> None:
        async with slots, open_session(team) as (url, key, team_session, session):
            await Player(http, url, key, report, seed * 10**6 + number).play()
            await session.close()
            report.turns += team_session.turns

    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as http:
        await asyncio.gather(*(one(number) for number in range(sessions)))
    written = Counter(
        (turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in report.turns
    )
    report.unaccounted = _unaccounted(recorder.completions, written)
    return report, model


def _unaccounted(given: Counter[Row], written: Counter[Row]) -> list[Row]:
    """Return completions without a turn and turns without a completion.

    A turn that ended at a stop has the first tokens of its completion.
    """
    lost, made_up = list((given - written).elements()), list[Row]()
    for prompt, tokens, logprobs in (written - given).elements():
        size = len(tokens)
        for row in lost:
            if (row[0], row[1][:size], row[2][:size]) == (prompt, tokens, logprobs):
                lost.remove(row)
                break
        else:
            made_up.append((prompt, tokens, logprobs))
    return lost + made_up


@torch.no_grad()
def worst_logprob(model: Any, turns: Sequence[Turn]) -> float:
    """Return the largest relative error of the turns' log-probabilities against the model in float64."""
    model = model.double()
    gaps = [0.0]
    for turn in turns:
        logits = model(torch.tensor([turn.prompt_ids + turn.completion_ids])).logits[
            0, len(turn.prompt_ids) - 1 : -1
        ]
        right = (
            (logits / turn.temperature)
            .log_softmax(-1)
            .gather(-1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
        )
        gap = (right - torch.tensor(turn.logprobs, dtype=torch.float64)).abs() / right.abs().clamp(
            min=1.0
        )
        gaps.append(float(gap.max()))
    return max(gaps)


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
