"""Scripted engine: canned replies, for tests of everything above an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout.base.errors import EngineError
from rollout.records.trajectory import Completion, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

Script = Callable[[tuple[int, ...], int], Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]]


class ScriptedEngine:
    """Answers at once from `script`: a function of (prompt ids, call index from 0) or a mapping from prompt ids.

    A reply ends at its first stop token (finish reason `stop`), is cut at `max_tokens` (`length`), and otherwise counts
    as complete (`stop`). Every log-probability is 0.
    """

    def __init__(self, script: Script, *, version: int = 0) -> None:
        self.version = version
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.loaded: list[
            tuple[int, tuple[str, ...]]
        ] = []  # (version, tensor names) of each update
        self._script = script

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The script's reply to `prompt_ids`.

        Raises:
            EngineError: the mapping has no such prompt.
        """
        prompt, call = tuple(prompt_ids), len(self.calls)
        self.calls.append((prompt, sampling))
        if callable(self._script):
            reply = list(self._script(prompt, call))
        elif prompt in self._script:
            reply = list(self._script[prompt])
        else:
            raise EngineError(f"the script has no reply to prompt {list(prompt)}")
        end = next((i + 1 for i, token in enumerate(reply) if token in sampling.stop), len(reply))
        cut = end > sampling.max_tokens
        tokens = tuple(reply[: min(end, sampling.max_tokens)])
        return Completion(
            token_ids=tokens,
            logprobs=(0.0,) * len(tokens),
            finish_reason="length" if cut else "stop",
            versions=(VersionSpan(version=self.version, start=0, end=len(tokens)),),
        )

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note the names and the version."""
        self.loaded.append((version, tuple(name for name, _ in tensors)))
        self.version = version
