"""Counterfactual replays: alternative replies to a turn, each played to its outcome (C3, arXiv 2603.06859).

A trajectory is played first. Then, for each turn that gets alternatives, the history is repeated from
the record, another reply to the same prompt is sampled, and the trajectory is continued with this
alternative. The continuation has the seeds of the trajectory, and a turn with the same prompt as in
the trajectory gets the recorded reply. So outcomes differ only because of the alternative.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import pvariance

from pydantic import Field

from rollout.base.async_tasks import gather_or_cancel
from rollout.base.section import Section
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import REPLAY_OUTCOME, ToolEvent, Turn
from rollout.teams.tree import (
    NO_ANSWERS,
    Branch,
    BranchedPlay,
    CallAnswer,
    CallKey,
    call_key,
    dropped_metrics,
    failure_metrics,
)


class Replays(Section):
    """Alternatives of the turns of a trajectory, each replayed to its outcome (C3)."""

    # Most alternatives of a turn, besides the reply that the trajectory continued with.
    alternatives: int = Field(ge=1)
    # Most alternatives of a step, divided equally among its trajectories; None: no bound.
    budget: int | None = Field(None, ge=1)
    # Also replay with an empty reply in place of each turn that may get alternatives: score `removal`,
    # which `explain` shows and no advantage uses.
    removal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Replays of one trajectory.

    Attributes:
        agents: agents whose turns may get alternatives.
        alternatives: maximum number of alternatives of a turn.
        budget: maximum number of alternatives of the trajectory; None: no bound.
        removal: True to also replay with an empty reply in place of each of the agents' turns.
    """

    agents: Collection[str]
    alternatives: int
    budget: int | None = None
    removal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """A turn of the trajectory that may get alternatives.

    Attributes:
        turn: index of the turn.
        round: index in `Branch.rounds` of the round with the turn's call.
    """

    turn: int
    round: int


@dataclass(eq=False, kw_only=True)
class ReplayedPlay(BranchedPlay):
    """One play of a task, and replays of it with alternatives of its turns.

    The trajectory equals that of a play without replays, if its agents speak one after the other.
    Its turns have node "", and the alternatives of a turn have nodes "1", "2" and so on.
    """

    plan: ReplayPlan

    def __post_init__(self) -> None:
        super().__post_init__()
        self._alternatives: dict[int, list[Turn]] = {}  # by turn
        # By turn: the trajectory's outcome minus that of its replay with an empty reply.
        self._removal_scores: dict[int, float] = {}
        # Number of tokens that successful replays sampled after the turn that they change.
        self._sampled_tokens = 0

    async def _play_branches(self) -> None:
        """Play the trajectory to its end, then replay its turns."""
        trajectory = self._branches[0]
        while not trajectory.ended:
            await trajectory.grow("")
        self.error = self.episode.error
        if self.error:
            return
        decisions = self._decisions()
        await self._replay_within_budget(decisions)
        if self.plan.removal:
            await gather_or_cancel(map(self._replay_with_empty_reply, decisions))

    def _decisions(self) -> list[_Decision]:
        """Return the turns that may get alternatives: the unmasked turns of the plan's agents."""
        turns = {turn.index: turn for turn in self.episode.turns}
        decisions = []
        for number, answered in enumerate(self._branches[0].rounds):
            for call, answer in answered:
                turn = turns.get(call.index)
                # A call that the orchestra cancelled has no turn. A call that failed has none either,
                # but its retry with a shorter prompt may have taken a turn with the same index.
                if turn is None or isinstance(answer, Exception):
                    continue
                if turn.agent in self.plan.agents and not turn.masked:
                    decisions.append(_Decision(turn=call.index, round=number))
        return decisions

    async def _replay_within_budget(self, decisions: Sequence[_Decision]) -> None:
        """Replay every decision; with a budget, spend it where the outcomes vary most.

        First every decision gets one alternative. If the budget is too small for that, decisions
        that are chosen at random get one each. The rest of the budget goes to the decisions with the
        highest variance of outcomes, and none of it to those whose outcomes are equal.
        """
        budget = self.plan.budget
        max_alternatives = self.plan.alternatives
        if budget is None:
            await self._replay_all([(decision, max_alternatives) for decision in decisions])
            return

        if budget < len(decisions):
            in_random_order = sorted(
                decisions,
                key=lambda decision: derive_seed(*self.seed_path, "replays", decision.turn),
            )
            decisions = in_random_order[:budget]
        await self._replay_all([(decision, 1) for decision in decisions])

        remaining = budget - len(decisions)
        further = []
        for decision in sorted(decisions, key=self._outcome_variance, reverse=True):
            if self._outcome_variance(decision):
                count = min(max_alternatives - 1, remaining)
                further.append((decision, count))
                remaining -= count
        await self._replay_all(further)

    def _outcome_variance(self, decision: _Decision) -> float:
        """Return the variance of the outcomes of the trajectory and of a turn's alternatives."""
        outcomes = [self.episode.outcome or 0.0]
        outcomes += [
            turn.scores[REPLAY_OUTCOME] for turn in self._alternatives.get(decision.turn, ())
        ]
        return pvariance(outcomes)

    async def _replay_all(self, counts: Sequence[tuple[_Decision, int]]) -> None:
        """Replay each decision with a number of further alternatives, all at once."""
        replays = []
        for decision, count in counts:
            first = len(self._alternatives.get(decision.turn, ())) + 1
            replays += [self._replay(decision, str(first + number)) for number in range(count)]
        for turn in await gather_or_cancel(replays):
            if turn is not None:
                self._alternatives.setdefault(turn.index, []).append(turn)

    async def _replay(self, decision: _Decision, node: str) -> Turn | None:
        """Replay the trajectory with another reply at a turn.

        Args:
            decision: the turn that gets another reply.
            node: `Turn.node` of the alternative.

        Returns:
            The alternative with the outcome of its replay; None if the replay failed, or if the
            policy did not reply.
        """
        branch = await self._replay_branch(decision, node)
        if branch is None:
            return None
        answers = {call.index: answer for call, answer in branch.rounds[decision.round]}
        answer = answers[decision.turn]
        if isinstance(answer, Exception):
            # The orchestra has handled the policy's failure, but there is no reply to score.
            self._dropped.update(dropped_metrics(answer))
            return None

        answer_count = sum(len(answered) for answered in branch.rounds[decision.round + 1 :])
        sampled_answers = self._sampled_answers(branch, decision)
        self._count_tokens(sampled_answers)

        # Only the decision's reply was sampled with this node.
        (alternative,) = [turn for turn in branch.episode.turns if turn.node == node]
        scores = {
            **alternative.scores,
            REPLAY_OUTCOME: branch.episode.outcome or 0.0,
            "replay_sampled": float(len(sampled_answers)),
            "replay_recorded": float(answer_count - len(sampled_answers)),
        }
        return replace(alternative, scores=scores)

    def _sampled_answers(self, branch: Branch, decision: _Decision) -> list[CallAnswer]:
        """Return the answers that a replay sampled after its decision.

        Answers that it took from the record are left out.
        """
        recorded = self._recorded
        sampled = []
        for answered in branch.rounds[decision.round + 1 :]:
            for call, answer in answered:
                # A recorded answer is handed over as the same object.
                if answer is not recorded.get(call_key(call)):
                    sampled.append(answer)
        return sampled

    def _count_tokens(self, answers: Sequence[CallAnswer]) -> None:
        """Add the tokens of answers to those that replays have sampled."""
        for answer in answers:
            if not isinstance(answer, Exception):
                turn, _ = answer
                self._sampled_tokens += len(turn.completion_ids)

    async def _replay_with_empty_reply(self, decision: _Decision) -> None:
        """Replay the trajectory with an empty reply at a turn, and store the turn's score `removal`.

        A turn of a chat is not replayed, because the chat's next prompt contains the tokens of its reply.
        """
        for call, answer in self._branches[0].rounds[decision.round]:
            if call.index != decision.turn or call.chat or isinstance(answer, Exception):
                continue
            turn, reply = answer
            # `CallRecord` keeps the results of calls to tools and environments by branch, and a branch's
            # name is derived from the seeds of its turns so far. The empty turn has another seed than
            # the trajectory's turn, so that later calls of the replay do not get the trajectory's results.
            empty_turn = replace(turn, text="", seed=derive_seed(turn.seed, "removed"))
            empty_answer = (empty_turn, replace(reply, text="", value=None))
            branch = await self._replay_branch(decision, "", {call_key(call): empty_answer})
            if branch is not None:
                self._count_tokens(self._sampled_answers(branch, decision))
                outcome = self.episode.outcome or 0.0
                outcome_if_empty = branch.episode.outcome or 0.0
                self._removal_scores[decision.turn] = outcome - outcome_if_empty

    @property
    def _recorded(self) -> dict[CallKey, CallAnswer]:
        """The answers of the trajectory, by call."""
        answers = {}
        for answered in self._branches[0].rounds:
            for call, answer in answered:
                answers[call_key(call)] = answer
        return answers

    async def _replay_branch(
        self, decision: _Decision, node: str, given: Mapping[CallKey, CallAnswer] = NO_ANSWERS
    ) -> Branch | None:
        """Repeat the history of a decision, and play from there to the end.

        Args:
            decision: the turn at which the replay leaves the trajectory.
            node: `Turn.node` of the turn, if it is sampled.
            given: answer of the turn in place of a sampled one.

        Returns:
            The branch; None if it failed.
        """
        rounds = self._branches[0].rounds
        recorded = self._recorded
        open_calls = [call_key(call) for call, _ in rounds[decision.round]]
        # Agents that speak at the same time keep their replies: a replay changes only one turn.
        others = {key: recorded[key] for key in open_calls if key[0] != decision.turn}

        branch = self._new_branch()
        self._branches.append(branch)
        try:
            await branch.repeat(rounds[: decision.round], open_calls)
            await branch.grow(node, {**others, **given})
            while not branch.ended:
                await branch.grow("", recorded)
        finally:
            await branch.close()
            self._branches.remove(branch)
        self._dropped.update(failure_metrics(branch.episode))
        return None if branch.episode.error else branch

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the trajectory, each followed by its alternatives.

        A turn that was also replayed with an empty reply has the score `removal`.
        """
        turns: list[Turn] = []
        for turn in self.episode.turns:
            if turn.index in self._removal_scores:
                turn = replace(
                    turn, scores={**turn.scores, "removal": self._removal_scores[turn.index]}
                )
            turns.append(turn)
            turns += self._alternatives.get(turn.index, ())
        return tuple(turns)

    @property
    def tools(self) -> list[ToolEvent]:
        """The tool calls of the trajectory, without those of its replays."""
        return self.episode.tools

    @property
    def leaf(self) -> str:
        """The node of the trajectory's turns."""
        return ""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the trajectory, the number of dropped replays, and `replayed_tokens`.

        Dropped replays are counted by reason as `dropped_branches/<reason>`. `replayed_tokens` is the
        number of tokens that the successful replays sampled after the turn that they change.
        """
        return super().metrics | {"replayed_tokens": float(self._sampled_tokens)}
