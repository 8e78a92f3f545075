"""Admission of waiting requests to rows of the KV cache."""

from collections import defaultdict, deque
from itertools import chain

from rollout.engines.embedded.decoder import PromptSpan
from rollout.engines.embedded.requests import Generation
from rollout.engines.embedded.rows import CacheRows


def admit(
    rows: CacheRows,
    waiting: deque[Generation],
    *,
    budget: int,
    reuse_prefixes: bool,
    one_by_one: bool,
) -> list[PromptSpan]:
    """Move waiting requests to rows in their order, up to the budget of one prefill pass.

    Requests with equal prompts are admitted together and computed once, unless `reuse_prefixes` is
    False.

    Args:
        rows: rows of the cache, of which idle ones are occupied.
        waiting: requests in the order of their arrival; the admitted ones are removed. Requests that
            remain are moved behind the first one that has the same prompt.
        budget: number of tokens after which no further prompt is admitted.
        reuse_prefixes: start a prompt from the cached keys of the longest prefix.
        one_by_one: admit one prompt only, and start it from no cached keys.

    Returns:
        The parts of prompts to compute.
    """
    if one_by_one:
        budget = 1
    spans: list[PromptSpan] = []
    by_prompt = defaultdict[tuple[int, bytes | int], deque[Generation]](deque)
    for generation in waiting:
        # Without reuse, the request's id keeps equal prompts apart.
        key = generation.prompt.tobytes() if reuse_prefixes else generation.id
        by_prompt[generation.adapter, key].append(generation)

    for same_prompt in by_prompt.values():
        if budget <= 0 or rows.live.all():
            break
        generation = same_prompt.popleft()
        size = len(generation.prompt)
        source = 0
        shared = 0
        if reuse_prefixes and not one_by_one:
            source, shared = rows.longest_prefix(generation.prompt, generation.adapter)
        row = rows.find_idle_row(source, shared)
        if not shared:
            source = row
        generation.cached_tokens = shared
        span = PromptSpan(
            row=row,
            start=shared,
            token_ids=generation.prompt[shared:],
            source=source,
            adapter=generation.adapter,
        )
        spans.append(span)
        budget -= size - shared
        rows.occupy(row, generation, source, shared, has_copies=bool(same_prompt))
        rows.cached[row] = size  # later spans of this pass may start from these keys

        while same_prompt and not rows.live.all():
            copy_row = rows.find_idle_row(0, 0)
            twin = same_prompt.popleft()
            twin.cached_tokens = size
            rows.occupy(copy_row, twin, row, size)
            span.copies.append(copy_row)

    waiting.clear()
    waiting.extend(chain.from_iterable(by_prompt.values()))
    return spans
