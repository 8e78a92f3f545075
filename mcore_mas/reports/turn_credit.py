"""Credit of the turns in a file of trajectories, computed with the estimators of its run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.credit.assign import (
    add_advantages,
    apply_estimators,
    filter_samples,
    mean_advantages,
)
from mcore_mas.credit.samples import CreditError, Sample, to_samples
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

    Both are empty if the estimators cannot run: an evaluation has no rewards, and a file has
    neither a critic's values nor the KL penalties of rewards. They are also empty if the run has no
    config that can be used. Turns that the run's filter leaves out have no credit.

    Args:
        file: file of the trajectories, in the folder train/trajectories of a run.
        trajectories: trajectories of the file.
    """
    try:
        config = RunConfig.load(file.resolve().parents[2] / "config.yaml")
        samples = to_samples(group_trajectories(trajectories))
        if config.filter is not None:
            samples = filter_samples(samples, config.filter)
        kl = config.loss.kl
        if not samples or (kl.coef and kl.where == "reward"):
            return {}, {}
        estimators = {name: config.advantage_of(name) for name in config.agents}
        advantages = mean_advantages(add_advantages(samples, estimators))
        return advantages, _peer_groups(samples, estimators, advantages)
    except (ConfigError, CreditError, IndexError):
        return {}, {}


def _peer_groups(
    samples: Sequence[Sample],
    estimators: Mapping[str, AdvantageConfig],
    advantages: TurnAdvantages,
) -> TurnGroups:
    """Return, for each turn, the groups in which the estimator of its agent compared it."""
    groups_of_turns: dict[tuple[str, str, int], list[PeerGroup]] = {}
    for applied in apply_estimators(samples, estimators):
        for label, statistics in applied.advantages.groups.items():
            groups: dict[tuple[str, int], PeerGroup] = {}  # by task and number of the group
            for row, index in enumerate(applied.indices):
                sample = samples[index]
                number = int(statistics.vote_group[statistics.vote_index[row]])
                if (sample.task, number) not in groups:
                    groups[sample.task, number] = PeerGroup(
                        label=label,
                        peer_columns=statistics.grouping.peer_columns,
                        vote_columns=statistics.grouping.vote_columns,
                        size=int(statistics.size[row]),
                        mean=float(statistics.mean[row]),
                        std=float(statistics.std[row]),
                        members=[],
                    )
                group = groups[sample.task, number]
                member = GroupMember(
                    sample=sample,
                    vote_score=float(statistics.score[row]),
                    advantage=advantages.get(sample.id),
                )
                group.members.append(member)
                if estimators[sample.agent] == applied.estimator:
                    groups_of_turns.setdefault(sample.id, []).append(group)
    return groups_of_turns
