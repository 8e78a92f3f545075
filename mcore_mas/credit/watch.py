"""Checks of a run's advantages, of its agents' turns and reward scales, and of their shares of the gradient."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.config.trainer import TrainerConfig, WatchConfig
from mcore_mas.credit.samples import CreditError, Sample
from mcore_mas.equations.advantages import estimator_grouping
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import step_label

# Number of consecutive steps without an advantage after which a training counts as collapsed. A warning is
# given then, and again after the run's last step if there still is no advantage.
_STEPS_OF_COLLAPSE = 5
# Warn about agents without a turn after this number of steps, or after the last step of a shorter run.
_STEPS_OF_IDLENESS = 5
_LARGE_SCALE_RATIO = 10.0  # warn if one agent's reward range is this many times another's


class CreditWatch:
    """Checker of a run's advantages and gradients, step by step.

    A step has a signal if a turn of it has an advantage other than 0. The check for a missing signal
    covers the first steps of a run only, not those after a resume. Steps in a row are counted anew
    after a resume.
    """

    def __init__(self) -> None:
        self._steps_before_first_signal = 0
        self._had_signal = False
        self._steps_since_signal = 0  # or since the start, if no step had a signal
        self._reason_without_signal = ""  # of the last step; "" if it had a signal
        self._checked_steps = 0  # since the start or the last resume
        self._agents_with_turns: set[str] = set()  # in any of these steps
        self._warned_pairs: set[tuple[str, str]] = set()  # agents with rewards of different scales
        # Number of latest steps in a row in which an agent had too large a share, by agent.
        self._steps_with_large_share: Counter[str] = Counter()

    def check(
        self,
        trainer: TrainerConfig,
        step: int,
        samples: Sequence[Sample],
        valid_share: float = math.nan,
    ) -> None:
        """Check the advantages of a step's samples; call it once per step, in order.

        Args:
            trainer: settings with the bounds of the checks.
            step: number of the step, from 0.
            samples: samples of the step, with advantages.
            valid_share: share of well-formed replies in the step, for the error; NaN if unknown.

        Raises:
            CreditError: an advantage is NaN, or exceeds `trainer.max_advantage`, or no turn of the
                run's first `trainer.signal_within` steps had an advantage other than 0.
        """
        largest = np.array([np.abs(sample.advantages or (0.0,)).max() for sample in samples])
        bound = math.inf if trainer.max_advantage is None else trainer.max_advantage
        if not (largest <= bound).all():  # NaN is not <= infinity
            worst = int(largest.argmax())  # argmax returns a NaN before any number
            sample = samples[worst]
            reason = (
                f"beyond trainer.max_advantage {bound:g}; its rewards are out of scale, or their σ is nearly zero: "
                "see `mcore-mas explain`, and change the advantage, the reward or the bound"
            )
            if math.isnan(largest[worst]):
                reason = "expected a number; see `mcore-mas explain`, and change the advantage or the reward"
            raise CreditError(
                f"{step_label(step)}: agent {sample.agent} has an advantage of {largest[worst]:.2g} "
                f"(trajectory {sample.trajectory}, turn {sample.turn}), {reason}"
            )

        has_signal = bool(largest.any())
        if has_signal:
            self._steps_since_signal = 0
            self._reason_without_signal = ""
        else:
            self._steps_since_signal += 1
            self._reason_without_signal = _reason_without_signal(samples, valid_share)

        self._had_signal = self._had_signal or has_signal
        if not self._had_signal:
            self._steps_before_first_signal += 1
        within = trainer.signal_within
        is_last_allowed_step = within is not None and step + 1 == within
        if is_last_allowed_step and self._steps_before_first_signal == within:
            raise CreditError(
                f"{step_label(step)}: no turn of the first {within} steps has an advantage, so nothing was "
                f"learned: {self._reason_without_signal}; see `mcore-mas explain`, "
                "or raise trainer.signal_within (null: never stop)"
            )

    @property
    def has_just_collapsed(self) -> bool:
        """True if the step checked last is the one at which a warning about steps without an advantage is due."""
        return self._steps_since_signal == _STEPS_OF_COLLAPSE

    def collapse_warning(self) -> str:
        """Return a warning about a team whose last steps had no advantage, or ""."""
        if self._steps_since_signal < _STEPS_OF_COLLAPSE:
            return ""
        return (
            f"no turn of the last {self._steps_since_signal} steps has an advantage, so nothing was "
            f"learned in them; in the last step: {self._reason_without_signal}; see `mcore-mas show`"
        )

    def idle_warning(
        self, agents: Collection[str], agents_of_turns: Collection[str], *, is_last: bool
    ) -> str:
        """Return a warning about agents without a turn, or ""; call it once per step.

        It is given at most once: after the fifth step since the start or the last resume, or after the
        run's last step if there are fewer.

        Args:
            agents: agents that the orchestra may ask.
            agents_of_turns: agents that took turns in this step, also in failed trajectories.
            is_last: True in the last step of the run.
        """
        self._checked_steps += 1
        self._agents_with_turns.update(agents_of_turns)
        steps = self._checked_steps
        is_due = steps == _STEPS_OF_IDLENESS or (is_last and steps < _STEPS_OF_IDLENESS)
        idle = [agent for agent in agents if agent not in self._agents_with_turns]
        if not is_due or not idle:
            return ""
        period = f"the last {steps} steps" if steps > 1 else "the last step"
        if len(idle) == 1:
            return (
                f"agent {idle[0]} took no turn in {period}, so it was not trained meanwhile; check when the "
                "orchestra asks it, or leave it out of the team"
            )
        return (
            f"agents {', '.join(idle)} took no turn in {period}, so they were not trained meanwhile; check when "
            "the orchestra asks them, or leave them out of the team"
        )

    def scale_warning(
        self, samples: Sequence[Sample], estimators: Mapping[str, AdvantageConfig]
    ) -> str:
        """Return a warning if agents that are compared with each other have rewards of very different scales, or "".

        The scale of an agent is the range of its rewards in the step. Each pair of agents is
        reported once.
        """
        groupings = [
            estimator_grouping(estimator.name, estimator.options)
            for estimator in estimators.values()
        ]
        if all(grouping is None or "agent" in grouping.peer_columns for grouping in groupings):
            return ""
        rewards = group_pairs((sample.agent, sample.reward) for sample in samples)
        scales = {
            agent: max(values) - min(values)
            for agent, values in rewards.items()
            if max(values) > min(values)
        }
        if not scales:
            return ""
        smallest = min(scales, key=scales.__getitem__)
        largest = max(scales, key=scales.__getitem__)
        ratio = scales[largest] / scales[smallest]
        if ratio < _LARGE_SCALE_RATIO or (smallest, largest) in self._warned_pairs:
            return ""
        self._warned_pairs.add((smallest, largest))
        return (
            f"agents' reward scales differ {ratio:.0f}x ({largest} {scales[largest]:g}, {smallest} "
            f"{scales[smallest]:g}): group-relative credit by task will mostly be noise; use drmas or normalised "
            "rewards"
        )

    def share_warning(self, watch: WatchConfig, shares: Mapping[str, float]) -> str:
        """Return a warning if an agent has had nearly the whole gradient of a shared policy for some steps, or "".

        An agent is reported once, when its share has first been too large in `watch.steps` steps in a
        row.

        Args:
            watch: bounds of the share and of the number of steps.
            shares: share of each agent in the gradient of its policy in this step. Agents that share
                their policy with no other, and those whose policy was not updated, are absent; their
                counts stay as they are.
        """
        if watch.share is None:
            return ""
        dominant = []  # usually one agent; several have different policies
        for agent, share in shares.items():
            steps = self._steps_with_large_share[agent]
            if steps >= watch.steps:
                continue  # the agent has been reported
            self._steps_with_large_share[agent] = steps + 1 if share > watch.share else 0
            if self._steps_with_large_share[agent] == watch.steps:
                dominant.append(agent)
        if not dominant:
            return ""
        return (
            f"{' and '.join(dominant)} had more than {watch.share:.0%} of the gradient of a shared policy in "
            f"{watch.steps} steps in a row, so the other agents of this policy hardly train; set loss.balance=agents, "
            "lower the loss_weight of this agent, or give it a policy of its own (trainer.watch)"
        )


def _reason_without_signal(samples: Sequence[Sample], valid_share: float) -> str:
    """Return why the turns of a step have no advantage, and what to change."""
    if valid_share == 0:
        return (
            "no reply of this step was well-formed (agent/*/valid_ratio is 0); reward attempts at "
            "the format, show it in the prompt, or begin with a cold start"
        )
    if not samples:
        return (
            "no turn of this step was left to compare; no trajectory was completed, or the filter dropped all of "
            "them: see to the failures, or change the filter"
        )
    rewards = {sample.reward for sample in samples}
    if rewards == {0.0}:
        return "every reward of this step is 0; take easier tasks, or a reward with parts"
    if len(rewards) == 1:
        return (
            f"every reward of this step is {rewards.pop():g}; take harder tasks, or another reward"
        )
    return "turns that are compared with each other got equal rewards; change tasks, reward or advantage"
