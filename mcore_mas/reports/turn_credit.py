"""Credit of the turns in a file of trajectories, computed with the estimators of its run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.credit.assign import (
    add_advantages,
    apply_estimators,
    filter_samples,
    mean_advantages,
)
from mcore_mas.credit.samples import CreditError, Sample, to_samples
from mcore_mas.equations.turns import GroupStatistics
from mcore_mas.reports.trajectory_page import (
    GroupMember,
    PeerGroup,
    TurnGroups,
)
from rollout.records.grouping import group_trajectories
from rollout.records.trajectory import Trajectory


def compute_turn_credit(
    file: Path, trajectories: Sequence[Trajectory]
) -> tuple[TurnAdvantages, TurnGroups]:
    """Compute the advantages and the peer groups of turns with the estimators of their run.

    Both are empty if the file lacks what the training used: rewards (the file of an evaluation), a
    critic's values, KL penalties of rewards, or the scores of a teacher. They are also empty if the
    run has no config that can be used. Turns that the run's filter leaves out have no credit.

    Args:
        file: file of the trajectories, in the folder train/trajectories of a run.
        trajectories: trajectories of the file.
    """
    try:
        config = RunConfig.load(file.resolve().parents[2] / "config.yaml")
        samples = to_samples(group_trajectories(trajectories))
        if config.filter is not None:
            samples = filter_samples(samples, config.filter)
        if not samples or config.teachers or _penalises_rewards(config):
            return {}, {}
        estimators = {name: config.advantage_of(name) for name in config.agents}
        advantages = mean_advantages(add_advantages(samples, estimators))
        return advantages, _peer_groups(samples, estimators, advantages)
    except (ConfigError, CreditError, IndexError):
        return {}, {}


def _penalises_rewards(config: RunConfig) -> bool:
    """Return True if the rewards of a policy get KL penalties."""
    penalties = [for_policy(config, policy).loss.kl for policy in config.trained]
    return any(kl.coef and kl.where == "reward" for kl in penalties)


def _peer_groups(
    samples: Sequence[Sample],
    estimators: Mapping[str, AdvantageConfig],
    advantages: TurnAdvantages,
) -> TurnGroups:
    """Return, for each turn, the groups in which the estimator of its agent compared it."""
    groups_of_turns: dict[tuple[str, str, int], list[PeerGroup]] = {}
    for applied in apply_estimators(samples, estimators):
        compared = [samples[index] for index in applied.indices]
        for label, statistics in applied.advantages.groups.items():
            peer_groups = _group_of_each_turn(label, statistics, compared, advantages)
            for sample, group in zip(compared, peer_groups, strict=True):
                # An estimator may also compare turns of agents whose advantages are another estimator's.
                if estimators[sample.agent] == applied.estimator:
                    groups_of_turns.setdefault(sample.id, []).append(group)
    return groups_of_turns


def _group_of_each_turn(
    label: str,
    statistics: GroupStatistics,
    turns: Sequence[Sample],
    advantages: TurnAdvantages,
) -> list[PeerGroup]:
    """Return the peer group of each turn; turns of one task in the same group share the object.

    Args:
        label: name of these groups in `Advantages.groups`.
        statistics: statistics of the groups.
        turns: turns that were compared, in the order of the statistics.
        advantages: advantages of turns, for the members of the groups.
    """
    group_numbers = statistics.vote_group[statistics.vote_index].tolist()
    # A peer group has the turns of one task, so a group with turns of several tasks becomes several.
    groups: dict[tuple[str, int], PeerGroup] = {}  # by task and number of the group
    group_of_turn = []
    for row, turn in enumerate(turns):
        number = group_numbers[row]
        if (turn.task, number) not in groups:
            groups[turn.task, number] = PeerGroup(
                label=label,
                peer_columns=statistics.grouping.peer_columns,
                vote_columns=statistics.grouping.vote_columns,
                size=int(statistics.size[row]),
                mean=float(statistics.mean[row]),
                std=float(statistics.std[row]),
                members=[],
            )
        group = groups[turn.task, number]
        member = GroupMember(
            sample=turn,
            vote_score=float(statistics.score[row]),
            advantage=advantages.get(turn.id),
        )
        group.members.append(member)
        group_of_turn.append(group)
    return group_of_turn
