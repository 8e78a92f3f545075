"""Engine with scripted replies, for tests of everything above an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout.base.errors import EngineError
from rollout.records.trajectory import Completion, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

Script = Callable[[tuple[int, ...], int], Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]]


class ScriptedEngine:
    """Engine that replies at once from a script.

    A reply ends at its first stop token (finish reason `stop`) or is cut at `max_tokens` (`length`).
    Without either it counts as complete (`stop`). Every log-probability is 0.

    Attributes:
        calls: prompt ids and sampling of each call.
        loaded: version and tensor names of each update of the weights.
    """

    def __init__(self, script: Script, *, version: int = 0) -> None:
        """Initialize an engine.

        Args:
            script: replies as a function of (prompt ids, number of earlier calls), or a mapping
                from prompt ids.
            version: version of the weights.
        """
        self.version = version
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.loaded: list[tuple[int, tuple[str, ...]]] = []
        self._script = script

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Return the script's reply to `prompt_ids`.

        Raises:
            EngineError: the mapping has no such prompt.
        """
        prompt = tuple(prompt_ids)
        call = len(self.calls)
        self.calls.append((prompt, sampling))
        if callable(self._script):
            reply = list(self._script(prompt, call))
        elif prompt in self._script:
            reply = list(self._script[prompt])
        else:
            raise EngineError(f"the script has no reply to prompt {list(prompt)}")

        end = len(reply)
        for position, token in enumerate(reply):
            if token in sampling.stop:
                end = position + 1
                break
        is_cut = end > sampling.max_tokens
        tokens = tuple(reply[: min(end, sampling.max_tokens)])
        return Completion(
            token_ids=tokens,
            logprobs=(0.0,) * len(tokens),
            finish_reason="length" if is_cut else "stop",
            versions=(VersionSpan(version=self.version, start=0, end=len(tokens)),),
        )

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Record the tensor names and the version."""
        self.loaded.append((version, tuple(name for name, _ in tensors)))
        self.version = version
