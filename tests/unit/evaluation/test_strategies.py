"""Strategies in Kuhn poker: probabilities of replies from an engine with known next tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcore_mas.evaluation.strategies import reply_probabilities, strategy_metrics
from rollout.base.errors import EngineError
from rollout.engines import EngineClient
from rollout.environments.games.best_response import information_sets
from rollout.environments.games.kuhn_poker import KuhnPoker
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from tests.support.play import Bytes
from tests.support.scripted_engine import ScriptedEngine

GAME = KuhnPoker()
STOP = 0
AGENTS = ("first", "second")


class KnownEngine:
    """Engine whose replies are words with known probabilities, each byte of which is a token.

    Attributes:
        prompts: prompts that were asked, with the part of the reply that was given.
    """

    def __init__(self, words: Mapping[str, float]) -> None:
        self.prompts: list[bytes] = []
        self._replies = {(*word.encode(), STOP): share for word, share in words.items()}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Report the tokens that may follow the prompt and the part of a reply after its last line."""
        assert (sampling.max_tokens, sampling.temperature) == (1, 0.5)
        prompt = bytes(prompt_ids)
        self.prompts.append(prompt)
        begun_reply = tuple(prompt.rpartition(b"\n")[2])
        shares: dict[int, float] = {}
        for reply, share in self._replies.items():
            if reply[: len(begun_reply)] == begun_reply:
                token = reply[len(begun_reply)]
                shares[token] = shares.get(token, 0.0) + share
        total = sum(shares.values())
        likeliest = sorted(shares, key=shares.__getitem__, reverse=True)
        return Completion(
            token_ids=(likeliest[0],),
            logprobs=(0.0,),
            finish_reason="length",
            versions=(VersionSpan(version=0, start=0, end=1),),
            candidates=(tuple((token, math.log(shares[token] / total)) for token in likeliest),),
        )


class LineBytes(Bytes):
    """Renderer whose prompts end with a line break, and whose replies end with the stop token."""

    def render(self, *arguments: Any) -> tuple[int, ...]:
        return (*super().render(*arguments), *b"\n")

    def encode_reply(self, text: str) -> tuple[int, ...]:
        return (*text.encode(), STOP)


def team_of(engine: object, role: str = "duelist") -> Team:
    agents = {
        name: Agent(
            name=name,
            role=replace(ROLES[role], system="", user=f"{name}: {{state}}"),
            policy="p",
            sampling=Sampling(temperature=0.5, max_tokens=9),
        )
        for name in AGENTS
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=LineBytes())})  # type: ignore[arg-type]


def metrics(team: Team) -> dict[str, float]:
    return asyncio.run(strategy_metrics(team, GAME))


def test_a_reply_has_the_product_of_the_probabilities_of_its_tokens() -> None:
    engine = KnownEngine({"pass": 0.3, "past": 0.3, "bet": 0.2, "bets": 0.1, "": 0.1})
    information = information_sets(GAME)
    probabilities = asyncio.run(reply_probabilities(team_of(engine), GAME, information))
    assert probabilities.keys() == information.keys()
    for row in probabilities.values():
        # "past" and "bets" begin like legal replies, but are not.
        assert row == {"pass": pytest.approx(0.3), "bet": pytest.approx(0.2)}
    # Every agent was asked in its own words, and once after each prefix of a reply: "", "p", "pa",
    # "pas", "pass", "b", "be" and "bet".
    assert len(engine.prompts) == len(set(engine.prompts)) == 12 * 8
    assert b"second: Your card: Q. Actions so far: bet.\nbe" in engine.prompts


def test_probabilities_are_renormalised_over_the_legal_replies() -> None:
    """Both actions have probability 0.4, so the strategy is the uniform one, exploited by 11/24."""
    measured = metrics(team_of(KnownEngine({"pass": 0.4, "bet": 0.4, "raise": 0.2})))
    assert measured == {
        "exploitability": pytest.approx(11 / 24),
        "value": pytest.approx(1 / 8),
        "legal_probability": pytest.approx(0.8),
    }


def test_a_policy_that_always_bets_is_exploited_by_a_third() -> None:
    measured = metrics(team_of(KnownEngine({"bet": 1.0})))
    assert measured["exploitability"] == pytest.approx(1 / 3)
    assert measured["value"] == pytest.approx(0)
    assert measured["legal_probability"] == pytest.approx(1)


def test_a_policy_without_legal_replies_counts_as_uniform() -> None:
    measured = metrics(team_of(KnownEngine({"raise": 1.0})))
    assert measured["exploitability"] == pytest.approx(11 / 24)
    assert measured["legal_probability"] == 0


def test_an_engine_without_likeliest_tokens_is_named() -> None:
    engine = ScriptedEngine(lambda prompt, call: (STOP,))
    with pytest.raises(EngineError, match=r"policy p: .* must fill `Completion.candidates`"):
        metrics(team_of(engine))


def test_replies_that_are_not_the_actions_themselves_are_not_measured() -> None:
    """The role `player` reads its actions after ####, so that a legal action has many replies."""
    engine = ScriptedEngine(lambda prompt, call: (STOP,))
    assert metrics(team_of(engine, role="player")) == {}
    assert engine.calls == []
