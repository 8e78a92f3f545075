"""Clients that sample from a run's policies: the run's engines and remote models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import for_policy
from rollout.base.errors import ModelError
from rollout.config.agents import build_player
from rollout.engines import PolicyClient
from rollout.engines.remote.client import RemoteClient
from rollout.engines.remote.scoring import RemoteScorer
from rollout.models.chat_template import Renderer


def open_remotes(config: RunConfig, folder: Path) -> dict[str, RemoteClient]:
    """Open the clients of the remote models that agents or opponents play, by policy.

    This must happen before any child process starts, because each client takes its key out of the
    environment.

    Args:
        config: config of the run.
        folder: folder below which the replies are recorded.

    Raises:
        RemoteError: a key is missing, or a folder is in use.
    """
    return {
        name: RemoteClient(remote, folder / name)
        for name, remote in config.remotes.items()
        if name in config.played
    }


def open_remote_teachers(config: RunConfig) -> dict[str, RemoteScorer]:
    """Return the clients of the remote models that teach, by policy; see `open_remotes`.

    Raises:
        RemoteError: a key is missing.
    """
    teachers = {teacher.policy for teacher in config.teachers.values()}
    return {
        name: RemoteScorer(remote) for name, remote in config.remotes.items() if name in teachers
    }


def check_teacher_tokenizers(config: RunConfig, renderers: Mapping[str, Renderer]) -> None:
    """Refuse a teacher whose folder has other token ids than its student's.

    Args:
        config: config of the run.
        renderers: renderer of each policy that is not a remote model.

    Raises:
        ConfigError: the teacher lacks a token of the student, or has it under another id.
    """
    for student, teacher in config.teachers.items():
        if teacher.policy not in renderers:
            continue
        teacher_ids = renderers[teacher.policy].vocabulary
        for token, token_id in renderers[student].vocabulary.items():
            teacher_id = teacher_ids.get(token)
            if teacher_id != token_id:
                mismatch = "has no such token" if teacher_id is None else f"has it as {teacher_id}"
                raise ConfigError(
                    f"policies.{student}.teacher: token {token!r} is {token_id} in the tokenizer of "
                    f"{config.models[student]}, and that of {config.models[teacher.policy]} {mismatch}; "
                    "a teacher needs the tokenizer of its student"
                )


def check_teacher_contexts(config: RunConfig, renderers: Mapping[str, Renderer]) -> None:
    """Refuse the context of a teacher whose student's chat template cannot write it.

    Args:
        config: config of the run.
        renderers: renderer of each policy with a folder.

    Raises:
        ConfigError: the template writes no system message without other messages.
    """
    for student, teacher in config.teachers.items():
        if teacher.context is not None:
            try:
                renderers[student].prepend_context(teacher.context, ())
            except ModelError as error:
                raise ConfigError(
                    f"policies.{student}.teacher.context: {config.models[student]}: {error}; leave the context out, "
                    f"or set policies.{student}.chat_template"
                ) from None


def make_renderers(config: RunConfig, models: Mapping[str, str | Path]) -> dict[str, Renderer]:
    """Return the renderer of each policy's chats, with the tokenizer of its folder in `models`.

    Raises:
        ModelError: a folder has no chat template, or its template does not read an argument in
            `chat_template_kwargs`.
    """
    renderers = {}
    for policy, model in models.items():
        policy_config = config.policies[policy]
        try:
            renderers[policy] = Renderer(
                model,
                template=policy_config.chat_template,
                arguments=policy_config.chat_template_kwargs,
            )
        except ModelError as error:
            raise ModelError(f"policies.{policy}: {error}") from None
    return renderers


def make_players(
    config: RunConfig,
    engines: Mapping[str, Any],
    servers: Mapping[str, int] | None = None,
) -> dict[str, PolicyClient]:
    """Return the clients of the policies that have an engine.

    An engine gets as many calls at a time as it has slots. More would wait in the engine, where
    their deadline already runs. Policies whose adapters are in one engine share its slots. A policy
    with `max_in_flight` has that bound instead.

    Args:
        config: config of the run.
        engines: engine, or adapter of an engine, by policy.
        servers: number of servers of each policy's engine; None: as many as the config says.
    """
    renderers = make_renderers(config, {policy: config.models[policy] for policy in engines})
    slots: dict[int, asyncio.Semaphore] = {}  # by `id` of the engine
    players: dict[str, PolicyClient] = {}
    for policy, engine in engines.items():
        section = for_policy(config, policy).engine
        host = getattr(engine, "host", engine)
        if id(host) not in slots:
            count = section.servers if servers is None else servers[policy]
            slots[id(host)] = asyncio.Semaphore(section.slots * count)
        players[policy] = build_player(
            engine,
            renderers[policy],
            deadline_s=config.collection.call_s,
            max_length=section.max_length,
            overlong_prompts=section.overlong_prompts,
            constrain=section.grammar,
            max_in_flight=config.policies[policy].max_in_flight or slots[id(host)],
        )
    return players
