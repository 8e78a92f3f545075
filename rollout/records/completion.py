"""Generation request and its seed; the completion, with the versions of the weights that sampled it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


def derive_seed(*place: int | str) -> int:
    """A 64-bit seed for one place in a run, for example (run seed, step, task, sample, agent, turn).

    Every random choice is a hash of where it happens. There is no generator state to save or restore: the same place
    gives the same seed after any restart.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    max_tokens: int = 512  # completion tokens, the stop token included
    stop: tuple[int, ...] = ()  # token ids that end a completion
    seed: int = 0  # 64-bit; equal seed, prompt and weights give equal tokens, where the engine can promise it
    session: str = field(default="", compare=False)  # requests of one session find each other's cached prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, end) that were sampled by one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one prompt."""

    token_ids: tuple[int, ...]  # [C], the stop token included
    logprobs: tuple[float, ...]  # [C] natural log of the full distribution after temperature
    finish_reason: str  # stop | length | abort
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused
