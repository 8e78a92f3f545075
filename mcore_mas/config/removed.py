"""Config keys of earlier versions, and what replaces each of them.

To remove or rename a key, take it out of its section and add a row to REMOVED_KEYS. The key of a row is the dotted
name of the removed key; `*` stands for any one name, such as that of a policy. Write `KEY=VALUE` if only one value of a
key was removed, or one entry of a list. The text of a row completes the sentence "KEY was removed: …", so it says what
to write instead. A row for `engine`, `loss` or `trainer` also applies below `policies.*.overrides`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REMOVED_KEYS: Mapping[str, str] = {
    "advantage.eps": "write advantage.options.eps",
    "advantage.lone": "write advantage.options.lone",
    "agents.*.tools.search.filters": "a search covers all passages; leave it out",
    "coach.answers_for": "write coach.judged_with_answer",
    "cold_start.betas": "leave it out; every cold start takes (0.9, 0.98)",
    "collection.journal": (
        "finished trajectories are always kept; those under way are sampled again after a restart"
    ),
    "engine.joining": "start all actors with engine.replicas, or use SGLang with engine.members",
    "engine.name=embedded_local": "write engine.name: embedded",
    "engine.name=embedded_replicas": "write engine.name: embedded, and engine.replicas",
    "engine.verify": "write engine.compare_servers",
    "opponents.policy": "name the policy as a key, opponents.NAME, as in opponents.NAME.share",
    "policies.*.own": "write policies.NAME.overrides",
    "retriever.backend": "FAISS searches on retriever.device; leave it out",
    "retriever.balance": "the servers in retriever.urls take turns; leave it out",
    "retriever.members": "list the servers in retriever.urls",
    "retriever.url": "write retriever.urls, a list",
    "tracking.also": "write tracking.further_trackers, with wandb or tensorboard",
    "tracking.zeros": "leave it out; MLflow is sent every metric",
    "trainer.logprob_tolerance": "bound the figures under trainer.agreement",
}


def removed_key_error(values: Mapping[str, Any], removed: Mapping[str, str] = REMOVED_KEYS) -> str:
    """Return a line about the first removed key or value in a nested config, or "" if there is none."""
    for removed_setting, replacement in removed.items():
        pattern, _, removed_value = removed_setting.partition("=")
        for keys, value in _find_settings(values, pattern.split(".")):
            if not removed_value:
                return f"{'.'.join(keys)} was removed: {replacement}"
            entries = value if isinstance(value, list | tuple) else [value]
            if removed_value in entries:
                return f"{'.'.join(keys)}: {removed_value} was removed: {replacement}"
    return ""


def _find_settings(values: Any, pattern: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the keys and the value of each setting that the pattern names, also below `policies.*.overrides`."""
    yield from _matches(values, pattern)
    if pattern[0] in ("engine", "loss", "trainer"):
        yield from _matches(values, ["policies", "*", "overrides", *pattern])


def _matches(values: Any, pattern: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the keys and the value of each setting that the pattern names."""
    if not pattern:
        yield [], values
        return
    if not isinstance(values, Mapping):
        return

    first, *rest = pattern
    keys = list(values) if first == "*" else [first]
    for key in keys:
        if key in values:
            for inner_keys, setting in _matches(values[key], rest):
                yield [str(key), *inner_keys], setting
