"""HTTP API of one SGLang server: request bodies, answers, deadlines, and errors."""

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
from rollout.engines.protocol import ScoredReply, TokenCallback
from rollout.models.architecture import Experts
from rollout.records.trajectory import Completion, Sampling, TokenCandidates, VersionSpan

RETRIES = 3  # further attempts after a broken connection
_ERROR_CHARS = 300  # length of a server's error message in an error
# Upper bound of an answer. The experts of a token of Qwen3 235B-A22B take 4 kB.
_MAX_REPLY_BYTES = 1 << 30
_TOP_P_OF_ONE_TOKEN = 1e-6  # top-p that leaves only the likeliest token
# Fields of an answer that have an entry for each token.
_LOGPROB_FIELDS = ("output_token_logprobs", "output_top_logprobs")
# A log-probability below this bound stands for -∞, which SGLang writes as the lowest float32, -3.4e38.
_MIN_FINITE_LOGPROB = -1e30


class SGLangClient:
    """Client of one server, which may be used from several event loops one after another."""

    def __init__(
        self, url: str, *, timeout_s: float, connections: int, key: str | None = None
    ) -> None:
        """Configure the client; no connection is opened.

        Args:
            timeout_s: seconds that a request may take.
            connections: maximum number of open connections.
            key: API key of the server; None: it requires none.
        """
        self.url = url
        self._http = HttpClient(
            url,
            token=key,
            connections=connections,
            timeout_s=timeout_s,
            max_reply_bytes=_MAX_REPLY_BYTES,
        )

    async def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        stream: StreamedReply | None = None,
    ) -> Any:
        """Send a request and return the JSON of the answer, None if it has none.

        Args:
            body: sent with POST; None: the path is read with GET.
            stream: collects an answer that comes as events; its result is then returned.

        Raises:
            Unanswered: no connection within the retries. The server is starting, dying or gone.
            EngineError: the deadline passed, or the server refused.
        """
        method = "GET" if body is None else "POST"

        async def attempt() -> HttpReply:
            on_chunk = stream.begin() if stream is not None else None
            try:
                return await self._http.send(method, path, body, on_chunk=on_chunk)
            except TimedOut as error:
                raise EngineError(f"SGLang {path}: {error}") from None

        reply = await retry(attempt, retries=RETRIES)
        answer = _parse(path, reply)
        return answer if stream is None else stream.result(path)

    async def up(self) -> bool:
        """Return True if the server answers and is ready."""
        try:
            reply = await self._http.send("GET", "/health", timeout_s=5)
        except Unanswered:
            return False
        return reply.status == 200

    async def has(self, path: str) -> bool:
        """Return True if the server's API has a path; raise Unanswered if it does not answer."""
        reply = await self._http.send("GET", "/openapi.json")
        return reply.status == 200 and path in reply.json().get("paths", {})


def _parse(path: str, reply: HttpReply) -> Any:
    """Return the JSON of a reply, None if it has none; raise EngineError if the request failed."""
    try:
        body = json.loads(reply.content) if reply.content else None
    except ValueError:
        body = None
    failed = isinstance(body, dict) and (body.get("success") is False or "error" in body)
    if reply.status != 200 or failed:
        message = _error_message(body, reply.text)
        raise EngineError(f"SGLang {path}: status {reply.status}: {message}")
    return body


def _error_message(body: Any, text: str) -> str:
    """Return the error message in the JSON of an answer, or `text` if it has none; on one line."""
    if isinstance(body, dict):
        message = body.get("message") or body.get("error_message") or body.get("error")
        if isinstance(message, dict):
            message = message.get("message", message)
        text = str(message or text)
    return " ".join(text.split())[:_ERROR_CHARS]


class StreamedReply:
    """A completion that a server sends in events.

    Each event has all tokens so far or, with `--incremental-streaming-output`, only the new ones.
    """

    def __init__(self, on_tokens: TokenCallback, abort: Callable[[], None]) -> None:
        """Prepare to collect a reply.

        Args:
            on_tokens: called with the new tokens of each event but the last, until it returns False.
            abort: called when `on_tokens` returns False; the last event then comes soon.
        """
        self._on_tokens = on_tokens
        self._abort = abort

    def begin(self) -> Callable[[bytes], None]:
        """Drop what an earlier attempt received; return the function that takes the answer's bytes."""
        self._wants_more = True
        self._rest = b""
        self._last_event: dict[str, Any] = {}
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {name: [] for name in _LOGPROB_FIELDS}
        return self._take

    def result(self, path: str) -> dict[str, Any]:
        """Return the answer in the form that it has without streaming.

        Raises:
            EngineError: the server failed, or ended the stream before the reply was complete.
        """
        last = self._last_event
        reason = (last.get("meta_info") or {}).get("finish_reason")
        # A request may fail after its stream has begun with status 200. The last event then has the
        # error.
        if "error" in last or not reason or reason.get("status_code"):
            message = _error_message(
                reason or last, "the stream ended before the reply was complete"
            )
            raise EngineError(f"SGLang {path}: {message}")
        meta = last["meta_info"] | self._logprobs
        return {**last, "output_ids": self._token_ids, "meta_info": meta}

    def _take(self, chunk: bytes) -> None:
        """Read the events that are complete with this chunk of the answer."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if not data.startswith(b"{"):  # such as [DONE]
                continue
            self._last_event = json.loads(data)
            if "error" not in self._last_event:
                self._add(self._last_event["output_ids"], self._last_event["meta_info"])

    def _add(self, token_ids: list[int], meta: Mapping[str, Any]) -> None:
        """Add the tokens of an event, and report the new ones.

        The tokens of the event that ends the reply are not reported, because the reply is about to be
        returned.
        """
        reported = len(self._token_ids)
        count = len(token_ids)
        # An event may repeat tokens of the events before it; its tokens replace them.
        position = max(0, meta["completion_tokens"] - count)
        self._token_ids[position:] = token_ids
        for name, values in self._logprobs.items():
            # The entries may be those of all tokens so far; the last ones belong to this event. Without
            # tokens, [-0:] would be all entries.
            entries = meta.get(name, ())
            values[position:] = entries[-count:] if count else []
        if self._wants_more and not meta["finish_reason"]:
            self._wants_more = self._on_tokens(reported, self._token_ids[reported:])
            if not self._wants_more:
                self._abort()


def request_body(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    seeded: bool,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Return the body of `/generate` for one completion with log-probabilities.

    Its `rid` names the request, for an abort.

    Args:
        seeded: send the seed; SGLang uses it in its deterministic inference only.
        adapter: name of the adapter that the server holds.
    """
    top_k = sampling.top_k or -1
    top_p = sampling.top_p
    if top_k == 1 and sampling.temperature > 0:
        # SGLang treats top-k 1 as greedy, and computes log-probabilities without temperature in a
        # batch that has greedy requests only.
        top_k = -1
        top_p = _TOP_P_OF_ONE_TOKEN
    sampling_params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": not sampling.stop,  # with True, SGLang ignores stop_token_ids too
    }
    if sampling.grammar:
        sampling_params["ebnf"] = sampling.grammar  # the llguidance backend takes Lark here too
    if seeded:
        # Our seeds are unsigned 64-bit integers, and SGLang's are signed; 31 bits fit both.
        sampling_params["sampling_seed"] = sampling.seed % 2**31
    body: dict[str, Any] = {
        "rid": uuid.uuid4().hex,
        "input_ids": list(prompt_ids),
        "sampling_params": sampling_params,
        "return_logprob": True,
    }
    if sampling.candidates:
        body["top_logprobs_num"] = sampling.candidates
    if adapter:
        body["lora_path"] = adapter
    return body


def parse_completion(reply: Mapping[str, Any], version: int) -> Completion:
    """Return the completion in an answer of `/generate`.

    Args:
        version: version to record if the server's weights were never updated.

    Raises:
        EngineError: the numbers of tokens and log-probabilities differ, or a token has no
            log-probability, as when the model computes NaN.
    """
    meta = reply["meta_info"]
    token_ids = tuple(reply["output_ids"])
    logprobs: tuple[Any, ...] = ()
    if token_ids:  # a reply without tokens may have an entry all the same
        logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"][-len(token_ids) :])
    if len(logprobs) != len(token_ids):
        raise EngineError(
            f"SGLang gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens"
        )
    if None in logprobs:  # JSON has no NaN
        raise EngineError(
            f"SGLang gave no log-probability for token {logprobs.index(None)} of a reply; is it "
            "NaN?"
        )
    spans = meta.get("weight_versions")
    if not spans:
        whole = {"version": meta.get("weight_version"), "start": 0, "end": len(token_ids)}
        spans = [whole]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=tuple(
            VersionSpan(
                version=_parse_version(span["version"], version),
                start=span["start"],
                end=span["end"],
            )
            for span in spans
        ),
        cached_tokens=meta.get("cached_tokens", 0),
        candidates=_parse_candidates(meta, len(token_ids)),
    )


def scoring_body(reply: ScoredReply, *, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of `/generate` that scores a reply and samples nothing.

    Args:
        adapter: name of the adapter that the server holds.

    Raises:
        EngineError: the temperature is not 1. SGLang does not apply it to given tokens.
    """
    if reply.temperature != 1:
        raise EngineError(
            f"SGLang scores given tokens at temperature 1 only, not at {reply.temperature:g}"
        )
    body: dict[str, Any] = {
        "rid": uuid.uuid4().hex,
        "input_ids": [*reply.prompt_ids, *reply.completion_ids],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        # The first entry has no log-probability, so the entries begin one token before the reply.
        "logprob_start_len": len(reply.prompt_ids) - 1,
    }
    if adapter:
        body["lora_path"] = adapter
    return body


def parse_scores(answer: Mapping[str, Any], reply: ScoredReply, vocab: int) -> list[float]:
    """Return the log-probabilities of a reply's tokens in the answer to a request with `scoring_body`.

    Args:
        answer: answer of the server.
        reply: reply that is scored.
        vocab: size of the model's vocabulary.

    Raises:
        EngineError: a token has no log-probability, or the entries are of other tokens.
    """
    # An entry is [log-probability, token id, text].
    size = len(reply.completion_ids)
    entries = (answer["meta_info"].get("input_token_logprobs") or [])[-size:]
    # SGLang writes 0 for the id of the vocabulary's last token, beside that token's log-probability.
    expected_ids = [0 if token == vocab - 1 else token for token in reply.completion_ids]
    if [entry[1] for entry in entries] != expected_ids:
        raise EngineError(f"SGLang gave no log-probabilities of the {size} tokens to score")
    logprobs = [entry[0] for entry in entries]
    if None in logprobs:  # JSON has no NaN
        raise EngineError(
            f"SGLang gave no log-probability for token {logprobs.index(None)} of a reply; is it NaN?"
        )
    return logprobs


def _parse_candidates(meta: Mapping[str, Any], size: int) -> tuple[TokenCandidates, ...]:
    """Return the candidates at each of the `size` tokens; () if the request asked for none."""
    entries = meta.get("output_top_logprobs")
    if not entries or not size:
        return ()
    candidates = []
    for entry in entries[-size:]:
        possible = [
            (token, logprob)
            for logprob, token, *_ in entry
            if logprob is not None and logprob > _MIN_FINITE_LOGPROB
        ]
        candidates.append(tuple(possible))
    return tuple(candidates)


def parse_routing(reply: Mapping[str, Any], prompt_length: int, experts: Experts) -> bytes:
    """Return the experts of all tokens of prompt and reply but the last, as `Completion` stores them.

    SGLang 0.5.23 sends int32 [prompt + reply - 1, layers, k] in base64, with all layers of the model.
    All of them are sparse, because `SGLangSettings` refuses a mixture with dense layers.

    Raises:
        EngineError: the experts are missing, too few, too many or out of range, or the first two
            experts of a token are the same.
    """
    encoded = reply["meta_info"].get("routed_experts")
    if encoded is None:
        raise EngineError(
            "SGLang gave no routed experts, which engine.router_replay needs; start servers of "
            "your own with --enable-return-routed-experts"
        )
    numbers = np.frombuffer(b64decode(encoded), "<i4")
    tokens = prompt_length + len(reply["output_ids"]) - 1
    shape = (tokens, sum(experts.sparse), experts.per_token)
    in_range = (numbers >= 0) & (numbers < experts.count)
    if numbers.size != math.prod(shape) or not in_range.all():
        raise EngineError(
            f"SGLang gave {numbers.size} routed experts between {numbers.min(initial=0)} and "
            f"{numbers.max(initial=0)}; expected {' x '.join(map(str, shape))} below "
            f"{experts.count}"
        )
    # A kernel that does not report its routing leaves expert 0 everywhere, so two of a token's experts
    # are enough to find it.
    first = numbers[:: experts.per_token]
    second = numbers[1 :: experts.per_token]
    if experts.per_token > 1 and (first == second).any():
        raise EngineError(
            "SGLang sent a token to one expert twice: it routes within a kernel that does not report "
            "the experts; set engine.options: {moe-runner-backend: triton}"
        )
    return numbers.astype(f"<u{experts.index_bytes}").tobytes()


def _parse_version(weight_version: Any, initial_version: int) -> int:
    """Return the number in a server's `weight_version`, or `initial_version` if it is not a number.

    The `weight_version` of a server that was never updated is the word "default".
    """
    is_number = str(weight_version).lstrip("-").isdecimal()
    return int(weight_version) if is_number else initial_version
