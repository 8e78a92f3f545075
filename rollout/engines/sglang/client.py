"""One SGLang server's HTTP API: request bodies, answers, deadlines, and errors in its words."""

from __future__ import annotations

import json
import math
import uuid
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.base.errors import EngineError
from rollout.base.http import HttpClient, HttpReply, TimedOut, Unanswered, retry
from rollout.engines.protocol import TokenCallback
from rollout.models.architecture import Experts
from rollout.records.trajectory import Completion, Sampling, VersionSpan

RETRIES = 3  # of a connection that broke
_SHOWN = 300  # characters of a server's words in an error
_REPLY_BYTES = (
    1 << 30
)  # of an answer, at most: the experts of a token take 4 kB of one of Qwen3 235B-A22B


class SGLangClient:
    """Calls one server, from one event loop after another."""

    def __init__(
        self, url: str, *, timeout_s: float, connections: int, key: str | None = None
    ) -> None:
        self.url = url
        self._http = HttpClient(
            url,
            token=key,
            connections=connections,
            timeout_s=timeout_s,
            max_reply_bytes=_REPLY_BYTES,
        )

    async def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        stream: StreamedReply | None = None,
    ) -> Any:
        """The JSON of the answer, None if it has no body; of one that comes in events, what `stream` makes of them.

        What is sent no `body` is read, with GET.

        Raises:
            Unanswered: no connection within the retries: it is starting, busy dying, or gone.
            EngineError: the deadline passed, or the server refused; with its text.
        """

        async def attempt() -> HttpReply:
            try:
                on_chunk = stream.begin() if stream is not None else None
                return await self._http.send(
                    "GET" if body is None else "POST", path, body, on_chunk=on_chunk
                )
            except TimedOut as error:
                raise EngineError(f"SGLang {path}: {error}") from None

        parsed = _parse(path, await retry(attempt, retries=RETRIES))
        return stream.whole(path) if stream is not None else parsed

    async def up(self) -> bool:
        """Whether the server answers and is ready."""
        try:
            return (await self._http.send("GET", "/health", timeout_s=5)).status == 200
        except Unanswered:
            return False

    async def has(self, path: str) -> bool:
        """Whether the server's API has a path, by what it says of itself; Unanswered if it says nothing."""
        reply = await self._http.send("GET", "/openapi.json")
        return reply.status == 200 and path in reply.json().get("paths", {})


def _parse(path: str, reply: HttpReply) -> Any:
    try:
        body = json.loads(reply.content) if reply.content else None
    except ValueError:
        body = None
    failed = isinstance(body, dict) and (body.get("success") is False or "error" in body)
    if reply.status != 200 or failed:
        raise EngineError(f"SGLang {path}: status {reply.status}: {_words(body, reply.text)}")
    return body


class StreamedReply:
    """A completion that a server sends in events, each with all tokens so far or, if it is `incremental`, with news."""

    def __init__(self, on_tokens: TokenCallback, end: Callable[[], None]) -> None:
        """`end` is called once where `on_tokens` does not want more; the last event then comes soon."""
        self._on_tokens, self._end = on_tokens, end
        self._wanted = True

    def begin(self) -> Callable[[bytes], None]:
        """What takes the answer's bytes; another attempt begins anew."""
        self._rest, self._last = b"", dict[str, Any]()
        self._ids, self._logprobs = list[int](), list[Any]()
        return self._take

    def whole(self, path: str) -> dict[str, Any]:
        """The answer as it would have come at once; EngineError if the server failed, or stopped before the end."""
        ended = (self._last.get("meta_info") or {}).get("finish_reason")
        if (
            "error" in self._last or not ended or ended.get("status_code")
        ):  # which without a stream is the answer's own
            raise EngineError(
                f"SGLang {path}: {_words(ended or self._last, 'the stream ended before its reply')}"
            )
        meta = {**self._last["meta_info"], "output_token_logprobs": self._logprobs}
        return {**self._last, "output_ids": self._ids, "meta_info": meta}

    def _take(self, part: bytes) -> None:
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]" or not data.startswith(b"{"):
                continue
            self._last = json.loads(data)
            if "error" not in self._last:
                self._add(self._last["output_ids"], self._last["meta_info"])

    def _add(self, ids: list[int], meta: Mapping[str, Any]) -> None:
        known, place = len(self._ids), max(0, meta["completion_tokens"] - len(ids))
        self._ids[place:] = ids
        self._logprobs[place:] = meta["output_token_logprobs"][-len(ids) :] if ids else []
        if (
            self._wanted
            and not meta["finish_reason"]
            and not self._on_tokens(known, self._ids[known:])
        ):
            self._wanted = False
            self._end()


def _words(body: Any, text: str) -> str:
    if isinstance(body, dict):
        said = body.get("message") or body.get("error_message") or body.get("error")
        text = str(said.get("message", said) if isinstance(said, dict) else said or text)
    return " ".join(text.split())[:_SHOWN]


_TINY = 1e-6  # a top-p that leaves the likeliest token only


def body_of(
    prompt_ids: Sequence[int], sampling: Sampling, seeded: bool, adapter: str | None = None
) -> dict[str, Any]:
    """One completion of token ids, with log-probabilities; `rid` is its name if it must be aborted."""
    seed = {"sampling_seed": sampling.seed % 2**31} if seeded else {}
    top_k, top_p = sampling.top_k or -1, sampling.top_p
    if top_k == 1 and sampling.temperature > 0:
        # SGLang calls top-k 1 greedy, and a batch of greedy requests alone gets log-probabilities without temperature
        top_k, top_p = -1, _TINY
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": list(prompt_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": not sampling.stop,  # it would ignore stop_token_ids too
            **seed,
        },
        "return_logprob": True,
        **({"lora_path": adapter} if adapter else {}),
    }


def completion_of(reply: Mapping[str, Any], version: int) -> Completion:
    """The completion in an answer; `version` is of a server whose weights were never updated.

    Raises:
        EngineError: a token has no log-probability, as when the model computes NaN.
    """
    meta = reply["meta_info"]
    tokens = tuple(reply["output_ids"])
    logprobs = (
        tuple(entry[0] for entry in meta["output_token_logprobs"][-len(tokens) :]) if tokens else ()
    )
    if len(logprobs) != len(tokens):
        raise EngineError(f"SGLang gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    if None in logprobs:  # JSON has no NaN
        raise EngineError(
            f"SGLang gave no log-probability for token {logprobs.index(None)} of a reply; is it NaN?"
        )
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}
    ]
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=tuple(
            VersionSpan(
                version=_number(span["version"], version), start=span["start"], end=span["end"]
            )
            for span in spans
        ),
        cached_tokens=meta.get("cached_tokens", 0),
    )


def routing_of(reply: Mapping[str, Any], prompt: int, experts: Experts) -> bytes:
    """Which experts each token of an answer to a `prompt` of so many went to, as `Completion` has them.

    SGLang 0.5.23 sends int32 [prompt + reply - 1, layers, k] in base64; every layer of its mixtures is sparse.

    Raises:
        EngineError: they are not there, not of so many tokens, or not numbers of different experts.
    """
    said = reply["meta_info"].get("routed_experts")
    if said is None:
        raise EngineError(
            "SGLang gave no routed experts, which engine.router_replay needs; start servers of your own with "
            "--enable-return-routed-experts"
        )
    numbers = np.frombuffer(b64decode(said), "<i4")
    want = (prompt + len(reply["output_ids"]) - 1, sum(experts.sparse), experts.per_token)
    if numbers.size != math.prod(want) or not ((numbers >= 0) & (numbers < experts.count)).all():
        raise EngineError(
            f"SGLang gave {numbers.size} routed experts between {numbers.min(initial=0)} and {numbers.max(initial=0)}; "
            f"expected {' x '.join(map(str, want))} below {experts.count}"
        )
    if (
        experts.per_token > 1
        and (numbers[:: experts.per_token] == numbers[1 :: experts.per_token]).any()
    ):
        raise EngineError(
            "SGLang sent a token to one expert twice: it routes within a kernel, and does not know where; set "
            "engine.options: {moe-runner-backend: triton}"
        )
    return numbers.astype(f"<u{experts.number_bytes}").tobytes()


def _number(said: Any, version: int) -> int:
    """A server that has not been updated calls its version `default`."""
    return int(said) if str(said).lstrip("-").isdecimal() else version
