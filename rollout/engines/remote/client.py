"""Client of a frozen model that plays an agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollout.base.deadlines import LateCall
from rollout.base.errors import EngineError
from rollout.base.http import Refused, Unanswered
from rollout.engines.policy_client import ChatState, PolicyReply
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.protocol import ReplySettings
from rollout.models.tool_calls import write_tools_as_text
from rollout.records.trajectory import EMPTY_COMPLETION, Message, Sampling

_LEDGER_AGENT = "external"  # agent that the calls are recorded for


class RemoteClient:
    """`PolicyClient` of a frozen model; its replies are text without tokens, and are not trained.

    The seed of a call is part of the digest of its recorded reply, so a run that is started
    again gets the replies that it got before.
    """

    def __init__(self, config: RemoteConfig, cache_folder: Path) -> None:
        """Read the key, and open replies and spending in `cache_folder`; see `Caller`."""
        self._config = config
        self._caller = Caller(config, cache_folder)
        self._tally = Tally()

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """Return the model's reply; see `PolicyClient`.

        Tools of a chat are described in its messages. `top_k` and the stops of a chat are not sent;
        OpenAI's protocol has no field for `top_k`.

        Raises:
            EngineError: there is no reply within the retries and the deadline, or the server
                refuses the prompt.
            BudgetExhausted: the call may cost more than the rest of the budget.
            RemoteError: the model cannot be used at all.
        """
        tools = () if chat is None else chat.tools
        messages = write_tools_as_text(messages, tools)
        settings = ReplySettings(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            top_p=sampling.top_p,
            seed=sampling.seed,
        )
        try:
            async with self._caller.slot() as deadline:
                answer = await self._caller.ask(
                    _LEDGER_AGENT, messages, settings, self._tally, deadline=deadline
                )
        except TimeoutError:
            raise LateCall(
                f"{self._config.model}: no reply within {self._config.deadline_s:g} s"
            ) from None
        except (Unanswered, Refused) as error:
            raise EngineError(f"{self._config.model}: {error}") from error
        return PolicyReply(
            text=answer.text,
            raw=answer.text,
            prompt_ids=(),
            completion=replace(EMPTY_COMPLETION, finish_reason=answer.finish_reason),
            trainable=False,
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the calls since `metrics` was called last."""
        tally = self._tally
        self._tally = Tally()
        return tally.metrics()

    async def aclose(self) -> None:
        """Close the connections and the ledger."""
        await self._caller.aclose()
