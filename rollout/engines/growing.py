"""Partial rollouts: a reply's tokens are recorded as they are sampled, and a restarted engine goes on behind them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rollout.base.task_group import CallRecord
from rollout.records.trajectory import Completion, Sampling, changed

KEPT = 16  # tokens that are put on record at a time: at most so many of a reply, and what is on its way, are lost
_NOTHING = Completion(token_ids=(), logprobs=(), finish_reason="", versions=())


@dataclass(eq=False)
class GrowingReply:
    """A reply under way, as an engine tells of it (see `Hear`)."""

    prompt: tuple[int, ...]
    sampling: Sampling
    record: CallRecord | None
    tell: (
        Callable[[int, Sequence[int]], bool] | None
    )  # hears tokens and the place of the first; whether to go on
    every: int = KEPT  # tokens that are worth telling

    def __post_init__(self) -> None:
        self._place, before = (
            self.record.part(self.sampling.seed, self.prompt) if self.record else ("", None)
        )
        self._before: Completion = before or _NOTHING
        self._begin()

    def _begin(self) -> None:
        self._next, self._new = self._place, _NOTHING

    async def sampled(self, stream: Callable[..., Awaitable[Completion]]) -> Completion:
        """The whole of it, sampled from where it was by an engine's `stream`."""
        before, sampling = self._before.token_ids, self.sampling
        if before and self.tell and not self.tell(0, before):
            return replace(self._before, finish_reason="abort")
        rest = changed(sampling, first=len(before), max_tokens=sampling.max_tokens - len(before))
        return self._before.then(await stream(self.prompt + before, rest, self))

    def __call__(self, place: int, part: Completion) -> bool:
        """Take a further part."""
        if not place:  # or the engine had to begin anew
            self._begin()
        self._new = self._new.then(part)
        if self.record and len(self._new.token_ids) >= KEPT:
            self._next, self._new = self.record.keep_part(self._next, self._new), _NOTHING
        before = self._before.token_ids
        told = (place + len(before), part.token_ids) if place else (0, before + part.token_ids)
        return self.tell is None or self.tell(*told)
