"""What a request says to SGLang's /generate, and what the answer means."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.engines.protocol import Completion, EngineError, Sampling, VersionSpan

_TINY = 1e-6  # a top-p that leaves the likeliest token only


def body_of(prompt_ids: Sequence[int], sampling: Sampling, *, seeded: bool) -> dict[str, Any]:
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
    }


def completion_of(reply: Mapping[str, Any], version: int) -> Completion:
    """The completion in an answer; `version` is of a server whose weights were never updated.

    Raises:
        EngineError: a token has no log-probability, as when the model computes NaN.
    """
    meta = reply["meta_info"]
    tokens = tuple(reply["output_ids"])
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"][-len(tokens) :]) if tokens else ()
    if len(logprobs) != len(tokens):
        raise EngineError(f"SGLang gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    if None in logprobs:  # JSON has no NaN
        raise EngineError(f"SGLang gave no log-probability for token {logprobs.index(None)} of a reply; is it NaN?")
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=tuple(
            VersionSpan(version=_number(span["version"], version), start=span["start"], end=span["end"])
            for span in spans
        ),
        cached_tokens=meta.get("cached_tokens", 0),
    )


def _number(said: Any, version: int) -> int:
    """A server that has not been updated calls its version `default`."""
    return int(said) if str(said).lstrip("-").isdecimal() else version
