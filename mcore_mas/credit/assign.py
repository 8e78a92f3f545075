"""Credit assignment: run the advantage estimators on a step's samples and store the advantages in the samples."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import count, islice
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.config.policy import TeacherConfig
from mcore_mas.credit.samples import CreditError, Sample, TurnId
from mcore_mas.equations.advantages import (
    AGENT_LOCAL_ESTIMATORS,
    REPLAY_ESTIMATORS,
    REQUIRED_COLUMN,
    TOKEN_LEVEL_ESTIMATORS,
)
from mcore_mas.equations.kl import KLName, kl_penalty
from mcore_mas.equations.turns import Advantages, Turns

_ID_COLUMNS = ("policy", "task", "agent", "trajectory", "state")

# Where the optional columns of `Turns` come from, for errors.
_COLUMN_SOURCES = {
    "values": "they come from a critic (policies.NAME.critic)",
    "greedy_rewards": (
        "they come from a greedy trajectory of each task, which only a training with this estimator plays"
    ),
    "step_rewards": (
        "a turn has them if the environment takes a step after it and the trajectory is not a tree"
    ),
}


def _key_columns(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return the key columns of `Turns`, [n] int64 by name, with texts and nodes replaced by ids."""
    keys = {
        "turn": torch.tensor([sample.turn for sample in samples]),
        "round": torch.tensor([sample.round for sample in samples]),
    }
    for column in _ID_COLUMNS:
        ids: dict[str, int] = {}
        texts = [getattr(sample, column) for sample in samples]
        keys[column] = torch.tensor([ids.setdefault(text, len(ids)) for text in texts])
    nodes, parents = _node_columns(samples)
    return {**keys, "node": nodes, "parent": parents}


def _node_columns(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the columns `node` and `parent` of `Turns`, [n] int64 each.

    A parent without samples, because its turns are filtered or masked, gets an id too, so that only
    its own children are siblings. A root without samples is the exception: its id is -1.
    """
    ids: dict[tuple[str, str], int] = {}  # by trajectory and node
    nodes = []
    for sample in samples:
        nodes.append(ids.setdefault((sample.trajectory, sample.node), len(ids)))

    parents = []
    for sample in samples:
        is_root = sample.node == ""
        parent = sample.node.rpartition(".")[0]
        if is_root:
            parents.append(-1)
        elif parent == "":  # the root
            parents.append(ids.get((sample.trajectory, ""), -1))
        else:
            parents.append(ids.setdefault((sample.trajectory, parent), len(ids)))
    return torch.tensor(nodes), torch.tensor(parents)


def columns(samples: Sequence[Sample]) -> Turns:
    """Convert samples to the columns that the estimators read, in the same order."""
    has_branches = any(sample.node for sample in samples)
    penalties = None
    if any(sample.penalties is not None for sample in samples):
        penalties = _token_column(
            [sample.penalties or (0.0,) * sample.trained_tokens for sample in samples]
        )
    rewards = [sample.reward - sum(sample.penalties or ()) for sample in samples]
    return Turns(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        keys=_key_columns(samples),
        lengths=torch.tensor([sample.trained_tokens for sample in samples]),
        # The rounds of a tree, and those of alternatives, do not follow one another in time.
        step_rewards=None if has_branches else _step_rewards(samples),
        greedy_rewards=_score_column(samples, "greedy"),
        penalties=penalties,
        values=_token_column([sample.values for sample in samples]),
        cluster_states=partial(_cluster_states, samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEstimator:
    """An estimator and its result for the samples of a step.

    Attributes:
        estimator: config of the estimator.
        indices: [n] indices of the samples that the estimator saw.
        turns: the columns of these samples.
        advantages: the result.
    """

    estimator: AdvantageConfig
    indices: Sequence[int]
    turns: Turns
    advantages: Advantages


def add_advantages(
    samples: Sequence[Sample], estimators: Mapping[str, AdvantageConfig]
) -> list[Sample]:
    """Return the samples with advantages, and with targets of the critic if their estimator has one.

    Args:
        samples: all turns of a step.
        estimators: estimator of each agent; several agents may have the same one. An estimator gives
            advantages only to the turns of its own agents. It compares them with the turns of all
            agents, or, if it is in AGENT_LOCAL_ESTIMATORS, only among themselves. Only the estimators
            in REPLAY_ESTIMATORS compare alternatives too.

    Raises:
        CreditError: an agent has no estimator, or a turn lacks a value that the estimator requires.
    """
    result = list(samples)
    for applied in apply_estimators(samples, estimators):
        is_by_token = applied.estimator.name in TOKEN_LEVEL_ESTIMATORS
        advantages = _token_rows(applied.turns, applied.advantages.values, by_token=is_by_token)
        returns: list[tuple[float, ...]] | list[None] = [None] * len(applied.indices)
        if applied.advantages.returns is not None:
            returns = _token_rows(applied.turns, applied.advantages.returns, by_token=True)
        for row, index in enumerate(applied.indices):
            if estimators[samples[index].agent] == applied.estimator:
                result[index] = replace(
                    samples[index], advantages=advantages[row], returns=returns[row]
                )
    return result


def apply_estimators(
    samples: Sequence[Sample], estimators: Mapping[str, AdvantageConfig]
) -> Iterator[AppliedEstimator]:
    """Yield the result of each distinct estimator of the samples' agents.

    Arguments and errors are those of `add_advantages`. An estimator in AGENT_LOCAL_ESTIMATORS sees
    only those turns of its agents in which a token carries loss, and is left out if there are none.
    """
    for estimator in _distinct_estimators(samples, estimators):
        indices = compared_indices(samples, estimator.name)
        if estimator.name in AGENT_LOCAL_ESTIMATORS:
            indices = [
                i
                for i in indices
                if estimators[samples[i].agent] == estimator and samples[i].trained_tokens
            ]
        if not indices:
            continue
        turns = columns([samples[i] for i in indices])
        advantages = run_estimator(turns, estimator)
        yield AppliedEstimator(
            estimator=estimator, indices=indices, turns=turns, advantages=advantages
        )


def compared_indices(samples: Sequence[Sample], estimator: str) -> list[int]:
    """Return the indices of the samples that an estimator may compare.

    These are all samples, but alternatives only for an estimator in REPLAY_ESTIMATORS.
    """
    with_alternatives = estimator in REPLAY_ESTIMATORS
    return [i for i, sample in enumerate(samples) if with_alternatives or not sample.is_alternative]


def run_estimator(turns: Turns, estimator: AdvantageConfig) -> Advantages:
    """Run an estimator on the turns. A user's estimator may return a tensor in place of `Advantages`.

    Raises:
        CreditError: a turn lacks the column that the estimator requires.
    """
    column = REQUIRED_COLUMN.get(estimator.name)
    if column is not None and getattr(turns, column) is None:
        raise CreditError(
            f"advantage '{estimator.name}' needs {column} of every turn, and a turn has none; "
            f"{_COLUMN_SOURCES[column]}"
        )
    result = estimator.call(turns)
    return result if isinstance(result, Advantages) else Advantages(result)


def mean_advantages(samples: Sequence[Sample]) -> dict[TurnId, float]:
    """Return the advantage of every turn that has one, averaged over its tokens."""
    return {sample.id: fmean(sample.advantages) for sample in samples if sample.advantages}


def add_teacher_advantages(
    samples: Sequence[Sample], teachers: Mapping[str, TeacherConfig]
) -> list[Sample]:
    """Add the advantages of on-policy distillation to the samples that a teacher has scored.

    The advantage of a token y is A + coef · (log ρ(y) − log μ(y)) for teacher ρ and sampler μ, with
    A = 0 if the policy learns from its teacher alone. Its expectation over y ~ μ is
    A − coef · KL(μ‖ρ), and its policy gradient that of the reverse KL divergence, token by token.

    Source: Thinking Machines 2025, https://thinkingmachines.ai/blog/on-policy-distillation;
    MiniLLM, arXiv 2306.08543, without its terms of later tokens.

    Args:
        samples: samples of a step, with the advantages of the reward.
        teachers: teacher of each policy that has one.
    """
    result = []
    for sample in samples:
        config = teachers.get(sample.policy)
        if config is None:
            result.append(sample)
            continue
        if sample.teacher is None:
            # The reply is masked, or too long for the teacher with its context.
            if config.alone:
                sample = replace(sample, advantages=(0.0,) * len(sample.advantages or ()))
            result.append(sample)
            continue
        assert sample.behaviour is not None
        reward_advantages = sample.advantages or (0.0,) * len(sample.completion_ids)
        if config.alone:
            reward_advantages = (0.0,) * len(sample.completion_ids)
        advantages = tuple(
            advantage + config.coef * (teacher - sampled)
            for advantage, teacher, sampled in zip(
                reward_advantages, sample.teacher, sample.behaviour, strict=True
            )
        )
        result.append(replace(sample, advantages=advantages))
    return result


def penalise(sample: Sample, coef: float, kind: KLName) -> Sample:
    """Set the token penalties of a sample to `coef` times the KL estimate `kind` against the reference."""
    penalty = coef * kl_penalty(
        torch.tensor(sample.behaviour), torch.tensor(sample.reference), kind
    )
    return replace(sample, penalties=tuple(penalty.tolist()))


def teacher_kl(samples: Sequence[Sample]) -> float:
    """Compute the mean reverse KL estimate k1 of the sampler against the teacher, in nats per token.

    Args:
        samples: samples that a teacher has scored, at least one.
    """
    differences: list[float] = []
    for sample in samples:
        pairs = zip(sample.behaviour or (), sample.teacher or (), strict=True)
        differences += [sampled - teacher for sampled, teacher in pairs]
    return fmean(differences)


def reference_kl(samples: Sequence[Sample], kind: KLName) -> float:
    """Compute the mean KL estimate of the sampler against the reference, in nats per token."""
    behaviour: list[float] = []
    reference: list[float] = []
    for sample in samples:
        behaviour += sample.behaviour or ()
        reference += sample.reference or ()
    estimates = kl_penalty(torch.tensor(behaviour), torch.tensor(reference), kind)
    return float(estimates.double().mean())


def filter_samples(samples: Sequence[Sample], filter_config: FilterConfig) -> list[Sample]:
    """Return the samples that pass a filter, in the same order."""
    if not samples:
        return []
    mask = filter_config.call(columns(samples)).tolist()
    return [sample for sample, passes in zip(samples, mask, strict=True) if passes]


def _distinct_estimators(
    samples: Sequence[Sample], estimators: Mapping[str, AdvantageConfig]
) -> list[AdvantageConfig]:
    distinct: list[AdvantageConfig] = []
    for sample in samples:
        if sample.agent not in estimators:
            raise CreditError(
                f"trajectory {sample.trajectory}, turn {sample.turn}: agent '{sample.agent}' has no "
                f"estimator; agents with one: {', '.join(estimators)}"
            )
        if estimators[sample.agent] not in distinct:
            distinct.append(estimators[sample.agent])
    return distinct


def _token_rows(turns: Turns, values: Tensor, *, by_token: bool) -> list[tuple[float, ...]]:
    """Return the value of each token of each turn.

    Args:
        turns: n turns with T tokens.
        values: [T] one value per token, or [n] one value per turn.
        by_token: True if `values` are per token. It is used only if T equals n; otherwise the length
            of `values` decides.
    """
    lengths = turns.lengths.tolist()
    tokens = sum(lengths)
    if len(values) == tokens and (by_token or tokens != len(lengths)):
        remaining = iter(values.tolist())
        return [tuple(islice(remaining, length)) for length in lengths]
    return [(value,) * length for value, length in zip(values.tolist(), lengths, strict=True)]


def _score_column(samples: Sequence[Sample], name: str) -> Tensor | None:
    """Return the score `name` of every turn, [n]; None if a turn lacks it."""
    values = [sample.scores.get(name) for sample in samples]
    if any(value is None for value in values):
        return None
    return torch.tensor(values, dtype=torch.float64)


def _step_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """Return the rewards of the environment's steps from each turn's round on, [n, K], padded with 0.

    K is the largest number of steps from a turn on. The result is None if a turn was followed by no step.
    """
    rows = [sample.step_rewards[sample.round :] for sample in samples]
    if not all(rows):
        return None
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def _token_column(rows: Sequence[tuple[float, ...] | None]) -> Tensor | None:
    """Concatenate the token values of all samples to [T]; return None if a sample has none."""
    values: list[float] = []
    for row in rows:
        if row is None:
            return None
        values += row
    return torch.tensor(values, dtype=torch.float64)


def _cluster_states(samples: Sequence[Sample], similarity: float) -> Tensor:
    """Assign each prompt to a cluster of similar prompts of its task; return cluster ids [n].

    A prompt joins the first cluster whose first prompt has a difflib ratio of at least `similarity`
    to it.
    """
    clusters: dict[str, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # by task
    next_id = count()
    ids = []
    for sample in samples:
        for cluster, prompt in clusters[sample.task]:
            matcher = SequenceMatcher(None, prompt, sample.prompt_ids, autojunk=False)
            if matcher.ratio() >= similarity:
                ids.append(cluster)
                break
        else:
            ids.append(next(next_id))
            clusters[sample.task].append((ids[-1], sample.prompt_ids))
    return torch.tensor(ids)
