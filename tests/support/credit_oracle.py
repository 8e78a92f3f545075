"""Second implementation of every advantage estimator, in NumPy and for one turn at a time.

`largest_differences` compares it with the product's on random batches.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import Sample

Key = Callable[[Sample], Hashable]

# Turns with equal keys are peers.
PEERS: dict[str, Key] = {
    "task": lambda sample: sample.task,
    "agent": lambda sample: (sample.task, sample.agent),
    "state": lambda sample: (sample.task, sample.state, sample.agent, sample.turn),
}
# Tokens of turns with equal keys are whitened together.
WHITENED: dict[str, Key] = {
    "batch": lambda sample: 0,
    "policy": lambda sample: sample.policy,
    "agent": lambda sample: sample.agent,
}
# (peers, vote, baseline, std) of estimators that are named choices of these options
NAMED_OPTIONS = {
    "grpo": ("task", "trajectory", "mean", "peers"),
    "dr_grpo": ("task", "trajectory", "mean", "none"),
    "drmas": ("agent", "turn", "mean", "peers"),
    "at_grpo": ("state", "turn", "mean", "peers"),
    "rloo": ("task", "trajectory", "others", "none"),
    "grpo_passk": ("task", "trajectory", "second", "peers"),
    "m_grpo": ("agent", "turn", "mean", "peers"),
}


def random_batch(rng: random.Random, *, tree: bool = False) -> list[Sample]:
    """Return samples of up to three tasks, with trajectories or trees of any size.

    The rewards of the agents differ by orders of magnitude. Every second round of the environment,
    and its last, has no turn in the batch.
    """
    scales = [(10.0 ** rng.randint(-2, 2), rng.gauss(0, 10)) for _ in range(3)]
    samples = []
    for task in range(rng.randint(1, 3)):
        for trajectory in range(rng.choice([1, 2, 6])):
            nodes = _random_tree(rng) if tree else [""] * rng.randint(1, 5)
            for turn, node in enumerate(nodes):
                agent = rng.randrange(3)
                tokens = rng.randint(1, 6)
                factor, shift = scales[agent]
                steps = tuple(((7 * task + 3 * trajectory + step) % 5) / 3 for step in range(6))
                sample = Sample(
                    policy=f"p{agent % 2}",
                    agent=f"a{agent}",
                    task=f"t{task}",
                    trajectory=f"t{task}-{trajectory}",
                    turn=node.count(".") if tree else turn,
                    round=turn // 2 * 2,
                    node=node,
                    state=f"s{rng.randrange(3)}",
                    prompt_ids=(1,),
                    completion_ids=(2,) * tokens,
                    reward=factor * rng.choice([0, 1, 0.9, -0.1, rng.gauss(0, 1)]) + shift,
                    scores={"greedy": 0.25 + task},
                    step_rewards=steps,
                    values=tuple(rng.gauss(0, 1) for _ in range(tokens)),
                )
                samples.append(sample)
    rng.shuffle(samples)
    return samples


def _random_tree(rng: random.Random) -> list[str]:
    """Return the nodes of a tree of up to three levels; one node of each level has children."""
    nodes = []
    parent = ""
    for _ in range(rng.randint(1, 3)):
        children = [f"{parent}.{branch}".lstrip(".") for branch in range(rng.randint(1, 3))]
        nodes += children
        parent = rng.choice(children)
    return nodes


def _groups(samples: Sequence[Sample], key: Key) -> dict[Hashable, list[int]]:
    """Return the indices of the samples, by key."""
    groups = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[key(sample)].append(index)
    return groups


def _mean(numbers: Iterable[float]) -> float:
    return fmean(numbers)


def _vote_key(peers: Key, vote: str) -> Key:
    """Return the key of votes: a turn is a vote, or the turns of a trajectory among the peers."""
    if vote == "turn":
        return lambda sample: (sample.trajectory, sample.node, sample.turn)
    return lambda sample: (sample.trajectory, peers(sample))


def _sigma(votes: Iterable[float], ddof: int) -> float:
    """Return the standard deviation over max(n - ddof, 1); 1 if the votes are equal."""
    numbers = list(votes)
    mean = _mean(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / max(len(numbers) - ddof, 1)
    sigma = float(np.sqrt(variance))
    return sigma if sigma > 1e-9 * max(1.0, abs(mean)) else 1.0


def _votes(
    samples: Sequence[Sample], scores: Sequence[float], peers: Key, vote: str
) -> dict[Hashable, dict[Hashable, float]]:
    """Return the mean score of each vote, by group of peers."""
    vote_key = _vote_key(peers, vote)
    votes: dict[Hashable, dict[Hashable, float]] = {}
    for group, indices in _groups(samples, peers).items():
        scores_by_vote = defaultdict(list)
        for index in indices:
            scores_by_vote[vote_key(samples[index])].append(scores[index])
        votes[group] = {key: _mean(numbers) for key, numbers in scores_by_vote.items()}
    return votes


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward for sample in samples]


def relative(
    samples: Sequence[Sample],
    scores: Sequence[float],
    peers: Key,
    vote: str,
    baseline: str,
    std: str,
    *,
    eps: float,
    ddof: int,
    lone: str,
) -> list[float]:
    """Return the advantage of every turn relative to its peers."""
    votes = _votes(samples, scores, peers, vote)
    vote_key = _vote_key(peers, vote)

    if std == "team":
        std_peers = PEERS["task"]
        std_vote = "trajectory"
    elif std == "agent":
        std_peers = PEERS["agent"]
        std_vote = "turn"
    else:
        std_peers = peers
        std_vote = vote
    std_votes = _votes(samples, scores, std_peers, std_vote)

    advantages = []
    for sample in samples:
        peer_votes = votes[peers(sample)]
        score = peer_votes[vote_key(sample)]
        if len(peer_votes) == 1:
            advantages.append(score if lone == "raw" else 0.0)
            continue

        others = [number for key, number in peer_votes.items() if key != vote_key(sample)]
        if baseline == "mean":
            advantage = score - _mean(peer_votes.values())
        elif baseline == "others":
            advantage = score - _mean(others)
        else:  # "second"
            advantage = max(score - max(others), 0.0)
        if std != "none":
            advantage /= _sigma(std_votes[std_peers(sample)].values(), ddof) + eps
        advantages.append(advantage)
    return advantages


def gigpo(
    samples: Sequence[Sample],
    peers: str,
    vote: str,
    std: str,
    weight: float,
    gamma: float,
    *,
    eps: float,
    ddof: int,
    lone: str,
) -> list[float]:
    """Return the sum of the trajectory's advantage and of the weighted advantage of the step."""
    returns = []
    for sample in samples:
        later_rewards = enumerate(sample.step_rewards[sample.round :])
        returns.append(sum(gamma**distance * reward for distance, reward in later_rewards))

    def anchor(sample: Sample) -> Hashable:
        return PEERS[peers](sample), sample.state

    episode_advantages = relative(
        samples,
        _rewards(samples),
        PEERS[peers],
        vote,
        "mean",
        std,
        eps=eps,
        ddof=ddof,
        lone=lone,
    )
    step_advantages = relative(
        samples, returns, anchor, "turn", "mean", std, eps=eps, ddof=ddof, lone="zero"
    )
    return [
        episode + weight * step
        for episode, step in zip(episode_advantages, step_advantages, strict=True)
    ]


def tree_baselines(samples: Sequence[Sample], lam: float) -> tuple[list[float], list[float]]:
    """Return the score of each turn's node, and the node's baseline."""
    groups = _groups(samples, lambda sample: (sample.trajectory, sample.node))
    node_scores = {
        key: _mean(samples[index].reward for index in indices) for key, indices in groups.items()
    }
    scores = []
    baselines = []
    for sample in samples:
        score = node_scores[sample.trajectory, sample.node]
        parent = sample.node.rpartition(".")[0]
        parent_score = node_scores.get((sample.trajectory, parent)) if parent else None
        siblings = [
            number
            for (trajectory, node), number in node_scores.items()
            if trajectory == sample.trajectory
            and node != sample.node
            and node.rpartition(".")[0] == parent
        ]
        if parent_score is not None and siblings:
            baseline = (1 - lam) * parent_score + lam * _mean(siblings)
        elif parent_score is not None:
            baseline = parent_score
        elif siblings:
            baseline = _mean(siblings)
        else:
            baseline = score
        scores.append(score)
        baselines.append(baseline)
    return scores, baselines


def mars2(
    samples: Sequence[Sample], gamma: float, lam: float, *, eps: float, ddof: int, lone: str
) -> list[float]:
    """Return the standardized shaped score of each turn's node in its tree."""
    scores, baselines = tree_baselines(samples, lam)
    shaped = [
        score + gamma * (score - baseline)
        for score, baseline in zip(scores, baselines, strict=True)
    ]
    advantages = [0.0] * len(samples)
    for indices in _groups(samples, lambda sample: sample.trajectory).values():
        votes = {samples[index].node: shaped[index] for index in indices}
        for index in indices:
            if len(votes) > 1:
                sigma = _sigma(votes.values(), ddof) + eps
                advantages[index] = (shaped[index] - _mean(votes.values())) / sigma
            elif lone == "raw":
                advantages[index] = shaped[index]
    return advantages


def whitened(samples: Sequence[Sample], rows: Sequence[Sequence[float]], over: str) -> list[float]:
    """Return the whitened numbers of all tokens [T]; `rows` has those of each turn."""
    whitened_rows: list[list[float]] = [[]] * len(samples)
    for indices in _groups(samples, WHITENED[over]).values():
        numbers = np.concatenate([np.asarray(rows[index], dtype=float) for index in indices])
        mean = numbers.mean()
        variance = ((numbers - mean) ** 2).sum() / max(1, len(numbers) - 1)
        scale = np.sqrt(variance + 1e-8)
        for index in indices:
            whitened_rows[index] = [float((number - mean) / scale) for number in rows[index]]
    return [number for row in whitened_rows for number in row]


def reinforce_pp(samples: Sequence[Sample], gamma: float, over: str) -> list[float]:
    """Return the whitened discounted rewards of all tokens."""
    rows = []
    for sample in samples:
        tokens_to_go = reversed(range(sample.trained_tokens))
        rows.append([sample.reward * gamma**tokens for tokens in tokens_to_go])
    return whitened(samples, rows, over)


def reinforce_pp_baseline(
    samples: Sequence[Sample], peers: str, vote: str, over: str
) -> list[float]:
    """Return the whitened rewards minus the mean of their peers."""
    votes = _votes(samples, _rewards(samples), PEERS[peers], vote)
    rows = []
    for sample in samples:
        baseline = _mean(votes[PEERS[peers](sample)].values())
        rows.append([sample.reward - baseline] * sample.trained_tokens)
    return whitened(samples, rows, over)


def gae(
    samples: Sequence[Sample], gamma: float, lam: float, across: str
) -> tuple[list[list[float]], list[list[float]]]:
    """Return advantages before whitening, and the critic's targets, by turn and token."""

    def sequence_key(sample: Sample) -> Hashable:
        return sample.trajectory, sample.node, sample.agent if across == "agent" else sample.turn

    advantages: list[list[float]] = [[]] * len(samples)
    for indices in _groups(samples, sequence_key).values():
        indices.sort(key=lambda index: samples[index].turn)
        rewards = []
        values = []
        for index in indices:
            rewards += [0.0] * (samples[index].trained_tokens - 1) + [samples[index].reward]
            values += samples[index].values or ()

        deltas = []
        for reward, value, next_value in zip(rewards, values, [*values[1:], 0.0], strict=True):
            deltas.append(reward + gamma * next_value - value)
        sequence = []
        for position in range(len(deltas)):
            later = enumerate(deltas[position:])
            sequence.append(sum((gamma * lam) ** distance * delta for distance, delta in later))
        for index in indices:
            tokens = samples[index].trained_tokens
            advantages[index] = sequence[:tokens]
            sequence = sequence[tokens:]

    targets = []
    for row, sample in zip(advantages, samples, strict=True):
        pairs = zip(row, sample.values or (), strict=True)
        targets.append([advantage + value for advantage, value in pairs])
    return advantages, targets


def _per_token(samples: Sequence[Sample], numbers: Iterable[float]) -> list[float]:
    """Repeat each turn's number for all of its tokens."""
    repeated = []
    for number, sample in zip(numbers, samples, strict=True):
        repeated += [number] * sample.trained_tokens
    return repeated


def cases(
    rng: random.Random, samples: Sequence[Sample], *, tree: bool
) -> Iterator[tuple[str, dict[str, Any], list[float]]]:
    """Yield (estimator, options, expected advantages of all tokens) for every choice of options."""
    common: dict[str, Any] = {
        "eps": rng.choice([1e-6, 1e-4, 0.1]),
        "ddof": rng.choice([0, 1]),
        "lone": rng.choice(["zero", "raw"]),
    }
    rewards = _rewards(samples)
    for name, (peers, vote, baseline, std) in NAMED_OPTIONS.items():
        expected = relative(samples, rewards, PEERS[peers], vote, baseline, std, **common)
        yield name, common, _per_token(samples, expected)

    votes = ("trajectory", "turn")
    baselines = ("mean", "others", "second")
    stds = ("peers", "team", "agent", "none")
    for peers, vote, baseline, std in product(PEERS, votes, baselines, stds):
        options = {"peers": peers, "vote": vote, "baseline": baseline, "std": std, **common}
        expected = relative(samples, rewards, PEERS[peers], vote, baseline, std, **common)
        # with all options set, each of the named estimators must compute the same
        yield rng.choice(list(NAMED_OPTIONS)), options, _per_token(samples, expected)

    gamma = rng.choice([1.0, 0.9, 0.5])
    lam = rng.choice([1.0, 0.95, 0.0])
    remax = [sample.reward - sample.scores["greedy"] for sample in samples]
    yield "remax", {}, _per_token(samples, remax)

    def prompt(sample: Sample) -> Hashable:
        return sample.trajectory, sample.turn

    c3 = relative(samples, rewards, prompt, "turn", "others", "none", eps=0, ddof=0, lone="zero")
    yield "c3", {}, _per_token(samples, c3)

    for over in WHITENED:
        yield "reinforce_pp", {"gamma": gamma, "whitened": over}, reinforce_pp(samples, gamma, over)
        for peers, vote in product(PEERS, votes):
            expected = reinforce_pp_baseline(samples, peers, vote, over)
            options = {"peers": peers, "vote": vote, "whitened": over}
            yield "reinforce_pp_baseline", options, expected
        for across in ("turn", "agent"):
            advantages, _ = gae(samples, gamma, lam, across)
            options = {"gamma": gamma, "lam": lam, "across": across, "whitened": over}
            yield "gae", options, whitened(samples, advantages, over)

    if tree:
        node_scores, node_baselines = tree_baselines(samples, lam)
        mcts = np.subtract(node_scores, node_baselines).tolist()
        yield "mcts", {"lam": lam}, _per_token(samples, mcts)
        options = {"gamma": gamma, "lam": lam, **common}
        yield "mars2", options, _per_token(samples, mars2(samples, **options))
        return

    for peers, vote, std in product(("task", "agent"), votes, ("peers", "none")):
        options = {"peers": peers, "vote": vote, "std": std}
        step = {"weight": rng.choice([0.0, 1.0, 2.0]), "gamma": gamma}
        expected = gigpo(samples, **options, **step, **common)
        yield "gigpo", {**options, "step": step, **common}, _per_token(samples, expected)


def _largest_difference(computed: Iterable[float], expected: Iterable[float]) -> float:
    pairs = zip(computed, expected, strict=True)
    return max(abs(ours - theirs) / (1 + abs(theirs)) for ours, theirs in pairs)


def largest_differences(batches: int = 25) -> dict[str, float]:
    """Return the largest |ours - theirs| / (1 + |theirs|) over random batches, by estimator.

    A third of the batches have trees. "gae's targets" are those of the critic.
    """
    worst: dict[str, float] = defaultdict(float)
    for seed in range(batches):
        rng = random.Random(seed)
        tree = seed % 3 == 2
        samples = random_batch(rng, tree=tree)
        for name, options, expected in cases(rng, samples, tree=tree):
            rule = AdvantageConfig(name=name, options=options)
            scored = add_advantages(samples, {sample.agent: rule for sample in samples})
            computed = [a for sample in scored for a in sample.advantages or ()]
            worst[name] = max(worst[name], _largest_difference(computed, expected))
            if name == "gae":
                _, targets = gae(samples, options["gamma"], options["lam"], options["across"])
                difference = _largest_difference(
                    [target for sample in scored for target in sample.returns or ()],
                    [target for row in targets for target in row],
                )
                worst["gae's targets"] = max(worst["gae's targets"], difference)
    return dict(worst)
