"""Log-probabilities of given tokens, from a server with OpenAI's completions API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rollout.base.errors import EngineError
from rollout.base.http import HttpClient, HttpReply, Refused, Unanswered, retry
from rollout.engines.protocol import ScoredReply, ScoringEngine
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.errors import RemoteError, status_error
from rollout.engines.remote.keys import read_key

# Characters for a space and a line break in a vocabulary. Some servers return tokens as the
# vocabulary spells them.
_VOCABULARY_MARKS = {"Ġ": " ", "▁": " ", "Ċ": "\n"}


class RemoteScorer(ScoringEngine):
    """Frozen model that scores replies, `POST {url}/completions`.

    A request is the token ids of prompt and reply, with `echo` and `logprobs`, as vLLM and SGLang
    serve it. One token is sampled, because not every server takes `max_tokens: 0`. Some servers
    give its log-probability too.
    """

    def __init__(self, config: RemoteConfig) -> None:
        """Read the key; no connection is opened.

        Raises:
            RemoteError: there is no key, or it cannot be used.
        """
        assert config.url is not None
        self._config = config
        self._key = read_key(config.key_variable, config.key_file)
        self._http = HttpClient(
            config.url,
            token=None if self._key is None else self._key.get_secret_value(),
            connections=config.concurrency,
            timeout_s=config.timeout_s,
            proxy=config.proxy,
        )

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        """Return the log-probabilities of replies at temperature 1; see `ScoringEngine`.

        Raises:
            RemoteError: the server cannot be used at all.
        """
        return await asyncio.gather(*(self._score_one(reply) for reply in replies))

    async def check_tokens(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Refuse a server whose model reads token ids as other texts than the student.

        Args:
            token_ids: at least two tokens.
            texts: text of each token in the student's tokenizer.

        Raises:
            RemoteError: the texts differ, or the server cannot be used at all.
            EngineError: the server does not score, or leaves out the texts of the tokens.
        """
        logprobs = await self._echo(token_ids)
        tokens = logprobs.get("tokens")
        if not isinstance(tokens, list) or len(tokens) < len(token_ids):
            raise EngineError(
                f"{self._name}: log-probabilities without the texts of the tokens; a teacher needs a "
                "server that answers `echo` with `logprobs`, such as vLLM or SGLang"
            )
        # The sampled token may follow those of the prompt.
        for token_id, expected, token in zip(token_ids, texts, tokens, strict=False):
            text = str(token)
            for mark, meaning in _VOCABULARY_MARKS.items():
                text = text.replace(mark, meaning)
            if text != expected:
                raise RemoteError(
                    f"{self._name}: token {token_id} is {text!r} there and {expected!r} in the "
                    "student's tokenizer; a teacher needs the tokenizer of its student"
                )

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._http.aclose()

    @property
    def _name(self) -> str:
        return f"teacher '{self._config.model}' at {self._config.url}"

    async def _score_one(self, reply: ScoredReply) -> list[float]:
        start = len(reply.prompt_ids)
        end = start + len(reply.completion_ids)
        logprobs = await self._echo([*reply.prompt_ids, *reply.completion_ids])
        values = logprobs["token_logprobs"][start:end]
        if None in values:
            raise EngineError(
                f"{self._name}: token {values.index(None)} of a reply has no log-probability"
            )
        return [float(value) for value in values]

    async def _echo(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Send the tokens, and return the field `logprobs` of the answer; see `_parse`."""
        body = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
            **self._config.request,
        }

        async def attempt() -> HttpReply:
            reply = await self._http.send("POST", "/completions", body)
            if reply.status != 200:
                raise status_error(reply.status, reply.text, reply.headers)
            return reply

        try:
            reply = await retry(attempt, retries=self._config.retries)
        except (Unanswered, Refused) as error:
            raise EngineError(self._redact(f"{self._name}: {error}")) from None
        except RemoteError as error:
            raise RemoteError(
                self._redact(f"{self._name}: {error}; check url, model and key")
            ) from None
        return self._parse(reply.content, len(token_ids))

    def _parse(self, content: bytes, size: int) -> dict[str, Any]:
        """Return the field `logprobs` of an answer.

        Raises:
            EngineError: it does not have the log-probabilities of the `size` tokens of the prompt,
                with or without that of the sampled token.
        """
        try:
            logprobs: dict[str, Any] = json.loads(content)["choices"][0]["logprobs"]
            count = len(logprobs["token_logprobs"])
        except (ValueError, KeyError, IndexError, TypeError):
            count = 0
        if count not in (size, size + 1):
            raise EngineError(
                f"{self._name}: log-probabilities of {count} tokens for a prompt of {size}; a teacher "
                "needs a server that answers `echo` with `logprobs`, such as vLLM or SGLang"
            )
        return logprobs

    def _redact(self, text: str) -> str:
        return text if self._key is None else self._key.redact(text)
