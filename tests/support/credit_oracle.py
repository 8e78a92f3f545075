"""Every estimator once more, written for one turn at a time in numpy, and ragged batches on which both are compared."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import Sample

Key = Callable[[Sample], Any]
PEERS: dict[str, Key] = {
    "task": lambda s: s.task,
    "agent": lambda s: (s.task, s.agent),
    "state": lambda s: (s.task, s.state, s.agent, s.turn),
}
WHITENED: dict[str, Key] = {
    "batch": lambda s: 0,
    "policy": lambda s: s.policy,
    "agent": lambda s: s.agent,
}
ROWS = {  # the options that make a row, written down a second time
    "grpo": ("task", "trajectory", "mean", "peers"),
    "dr_grpo": ("task", "trajectory", "mean", "none"),
    "drmas": ("agent", "turn", "mean", "peers"),
    "at_grpo": ("state", "turn", "mean", "peers"),
    "rloo": ("task", "trajectory", "others", "none"),
    "grpo_passk": ("task", "trajectory", "second", "peers"),
    "m_grpo": ("agent", "turn", "mean", "peers"),
}


def ragged(rng: random.Random, *, tree: bool = False) -> list[Sample]:
    """A batch of up to three tasks, with trajectories or trees of any size, agents of very different rewards.

    Every second round of the environment, and its last, has no turn here.
    """
    scales = [(10.0 ** rng.randint(-2, 2), rng.gauss(0, 10)) for _ in range(3)]
    samples = []
    for task, trajectory in (
        (t, k) for t in range(rng.randint(1, 3)) for k in range(rng.choice([1, 2, 6]))
    ):
        nodes = _tree(rng) if tree else [""] * rng.randint(1, 5)
        for turn, node in enumerate(nodes):
            agent, tokens = rng.randrange(3), rng.randint(1, 6)
            factor, shift = scales[agent]
            samples.append(
                Sample(
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
                    steps=tuple(((7 * task + 3 * trajectory + step) % 5) / 3 for step in range(6)),
                    values=tuple(rng.gauss(0, 1) for _ in range(tokens)),
                )
            )
    rng.shuffle(samples)
    return samples


def _tree(rng: random.Random) -> list[str]:
    nodes, parent = [], ""
    for _ in range(rng.randint(1, 3)):
        own = [f"{parent}.{b}".lstrip(".") for b in range(rng.randint(1, 3))]
        nodes += own
        parent = rng.choice(own)
    return nodes


def _groups(samples: Sequence[Sample], key: Key) -> dict[Any, list[int]]:
    found = defaultdict(list)
    for i, sample in enumerate(samples):
        found[key(sample)].append(i)
    return found


def _vote(peers: Key, vote: str) -> Key:
    """A turn is a vote, or a trajectory's turns among these peers are."""
    if vote == "turn":
        return lambda s: (s.trajectory, s.node, s.turn)
    return lambda s: (s.trajectory, peers(s))


def _sigma(votes: Sequence[float], ddof: int) -> float:
    """σ with max(n - ddof, 1), 1 for votes that do not differ."""
    mean = np.mean(votes)
    sigma = np.sqrt(sum((v - mean) ** 2 for v in votes) / max(len(votes) - ddof, 1))
    return float(sigma) if sigma > 1e-9 * max(1.0, abs(mean)) else 1.0


def _votes(
    samples: Sequence[Sample], scores: Sequence[float], peers: Key, vote: str
) -> dict[Any, dict[Any, float]]:
    """By peer group, the score of each vote."""
    by = _vote(peers, vote)
    return {
        group: {
            v: float(np.mean([scores[i] for i in own if by(samples[i]) == v]))
            for v in {by(samples[i]) for i in own}
        }
        for group, own in _groups(samples, peers).items()
    }


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward for sample in samples]


def relative(
    samples: Sequence[Sample], scores: Sequence[float], peers: Key, vote: str, baseline: str, std: str,
    *, eps: float, ddof: int, lone: str,
) -> list[float]:  # fmt: skip
    """A by turn, each by itself."""
    votes, by = _votes(samples, scores, peers, vote), _vote(peers, vote)
    of = {
        "peers": (peers, vote),
        "team": (PEERS["task"], "trajectory"),
        "agent": (PEERS["agent"], "turn"),
    }
    spread = _votes(samples, scores, *of[std]) if std != "none" else {}
    out = []
    for sample in samples:
        own, mine = votes[peers(sample)], by(sample)
        r = own[mine]
        if len(own) == 1:
            out.append(r if lone == "raw" else 0.0)
            continue
        others = [v for name, v in own.items() if name != mine]
        lead = r - max(others) if baseline == "second" else 0.0
        advantage = {
            "mean": r - np.mean(list(own.values())),
            "others": r - np.mean(others),
            "second": max(lead, 0.0),
        }
        sigma = (
            _sigma(list(spread[of[std][0](sample)].values()), ddof) + eps if std != "none" else 1.0
        )
        out.append(float(advantage[baseline]) / sigma)
    return out


def gigpo(
    samples: Sequence[Sample],
    peers: str,
    vote: str,
    std: str,
    weight: float,
    gamma: float,
    **kw: Any,
) -> list[float]:
    returns = [
        sum(gamma ** (k - s.round) * r for k, r in enumerate(s.steps) if k >= s.round)
        for s in samples
    ]
    episode = relative(samples, _rewards(samples), PEERS[peers], vote, "mean", std, **kw)
    anchored: Key = lambda s: (PEERS[peers](s), s.state)  # noqa: E731
    step = relative(samples, returns, anchored, "turn", "mean", std, **kw | {"lone": "zero"})
    return [a + weight * b for a, b in zip(episode, step, strict=True)]


def tree_baselines(samples: Sequence[Sample], lam: float) -> tuple[list[float], list[float]]:
    """(score of each turn's node, its baseline)."""
    nodes = {
        key: float(np.mean([samples[i].reward for i in own]))
        for key, own in _groups(samples, lambda s: (s.trajectory, s.node)).items()
    }
    own, baselines = [], []
    for sample in samples:
        above = sample.node.rpartition(".")[0]
        parent = nodes.get((sample.trajectory, above)) if above else None
        others = [
            v
            for (t, n), v in nodes.items()
            if t == sample.trajectory and n != sample.node and n.rpartition(".")[0] == above
        ]
        mine = nodes[sample.trajectory, sample.node]
        siblings = float(np.mean(others)) if others else None
        if parent is not None and siblings is not None:
            baselines.append((1 - lam) * parent + lam * siblings)
        else:
            baselines.append(next((b for b in (parent, siblings) if b is not None), mine))
        own.append(mine)
    return own, baselines


def mars2(
    samples: Sequence[Sample], gamma: float, lam: float, *, eps: float, ddof: int, lone: str
) -> list[float]:
    own, baselines = tree_baselines(samples, lam)
    shaped = [r + gamma * (r - b) for r, b in zip(own, baselines, strict=True)]
    out = [0.0] * len(samples)
    for turns in _groups(samples, lambda s: s.trajectory).values():
        votes = {samples[i].node: shaped[i] for i in turns}
        for i in turns:
            centred = shaped[i] - float(np.mean(list(votes.values())))
            alone = shaped[i] if lone == "raw" else 0.0
            out[i] = (
                centred / (_sigma(list(votes.values()), ddof) + eps) if len(votes) > 1 else alone
            )
    return out


def whitened(samples: Sequence[Sample], rows: Sequence[Sequence[float]], over: str) -> list[float]:
    """[T] of `rows` by turn and token."""
    out: list[list[float]] = [[]] * len(samples)
    for own in _groups(samples, WHITENED[over]).values():
        x = np.concatenate([np.asarray(rows[i], dtype=float) for i in own])
        var = ((x - x.mean()) ** 2).sum() / max(1, len(x) - 1)
        for i in own:
            out[i] = [(float(v) - float(x.mean())) / float(np.sqrt(var + 1e-8)) for v in rows[i]]
    return [v for row in out for v in row]


def reinforce_pp(samples: Sequence[Sample], gamma: float, over: str) -> list[float]:
    rows = [[s.reward * gamma ** (s.tokens - 1 - t) for t in range(s.tokens)] for s in samples]
    return whitened(samples, rows, over)


def reinforce_pp_baseline(
    samples: Sequence[Sample], peers: str, vote: str, over: str
) -> list[float]:
    votes = _votes(samples, _rewards(samples), PEERS[peers], vote)
    rows = [
        [s.reward - float(np.mean(list(votes[PEERS[peers](s)].values())))] * s.tokens
        for s in samples
    ]
    return whitened(samples, rows, over)


def gae(
    samples: Sequence[Sample], gamma: float, lam: float, across: str
) -> tuple[list[list[float]], list[list[float]]]:
    """(A before whitening, the critic's targets) by turn and token, each δ summed by itself."""
    advantages: list[list[float]] = [[]] * len(samples)
    line: Key = lambda s: (s.trajectory, s.node, s.agent if across == "agent" else s.turn)  # noqa: E731
    for own in _groups(samples, line).values():
        own.sort(key=lambda i: samples[i].turn)
        rewards = [r for i in own for r in [*[0.0] * (samples[i].tokens - 1), samples[i].reward]]
        values = [v for i in own for v in samples[i].values or ()]
        after = [*values[1:], 0.0]
        deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
        flat = [
            sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        for i in own:
            advantages[i], flat = flat[: samples[i].tokens], flat[samples[i].tokens :]
    targets = [
        [a + v for a, v in zip(row, s.values or (), strict=True)]
        for row, s in zip(advantages, samples, strict=True)
    ]
    return advantages, targets


def _spread(samples: Sequence[Sample], values: Iterable[float]) -> list[float]:
    """[T] from a number by turn."""
    return [v for v, s in zip(values, samples, strict=True) for _ in range(s.tokens)]


def cases(
    rng: random.Random, samples: Sequence[Sample], *, tree: bool
) -> Iterator[tuple[str, dict[str, Any], list[float]]]:
    """Every estimator with every choice of its options, as (name, options, A by token)."""
    kw: dict[str, Any] = {
        "eps": rng.choice([1e-6, 1e-4, 0.1]),
        "ddof": rng.choice([0, 1]),
        "lone": rng.choice(["zero", "raw"]),
    }
    rewards = _rewards(samples)
    for name, (peers, vote, baseline, std) in ROWS.items():
        yield (
            name,
            kw,
            _spread(samples, relative(samples, rewards, PEERS[peers], vote, baseline, std, **kw)),
        )
    for peers, vote, baseline, std in product(
        PEERS,
        ("trajectory", "turn"),
        ("mean", "others", "second"),
        ("peers", "team", "agent", "none"),
    ):
        chosen = {"peers": peers, "vote": vote, "baseline": baseline, "std": std}
        made = relative(samples, rewards, PEERS[peers], vote, baseline, std, **kw)
        yield rng.choice(list(ROWS)), chosen | kw, _spread(samples, made)
    gamma, lam = rng.choice([1.0, 0.9, 0.5]), rng.choice([1.0, 0.95, 0.0])
    yield "remax", {}, _spread(samples, [s.reward - s.scores["greedy"] for s in samples])
    for over in WHITENED:
        yield "reinforce_pp", {"gamma": gamma, "whitened": over}, reinforce_pp(samples, gamma, over)
        for peers, vote in product(PEERS, ("trajectory", "turn")):
            made = reinforce_pp_baseline(samples, peers, vote, over)
            yield "reinforce_pp_baseline", {"peers": peers, "vote": vote, "whitened": over}, made
        for across in ("turn", "agent"):
            made = whitened(samples, gae(samples, gamma, lam, across)[0], over)
            yield "gae", {"gamma": gamma, "lam": lam, "across": across, "whitened": over}, made
    if tree:
        own, baselines = tree_baselines(samples, lam)
        yield "mcts", {"lam": lam}, _spread(samples, np.subtract(own, baselines).tolist())
        yield (
            "mars2",
            {"gamma": gamma, "lam": lam, **kw},
            _spread(samples, mars2(samples, gamma, lam, **kw)),
        )
    else:
        for peers, vote, std in product(
            ("task", "agent"), ("trajectory", "turn"), ("peers", "none")
        ):
            chosen = {"peers": peers, "vote": vote, "std": std}
            step = {"weight": rng.choice([0.0, 1.0, 2.0]), "gamma": gamma}
            yield (
                "gigpo",
                {**chosen, "step": step, **kw},
                _spread(samples, gigpo(samples, **chosen, **step, **kw)),
            )


def largest_differences(batches: int = 25) -> dict[str, float]:
    """By estimator, the largest |ours - theirs| / (1 + |theirs|) over ragged batches, a third of them of trees."""
    worst: dict[str, float] = {}
    for seed in range(batches):
        rng = random.Random(seed)
        tree = seed % 3 == 2
        samples = ragged(rng, tree=tree)
        for name, options, expected in cases(rng, samples, tree=tree):
            rule = AdvantageConfig(name=name, options=options)
            made = add_advantages(samples, {sample.agent: rule for sample in samples})
            got = [a for sample in made for a in sample.advantages or ()]
            apart = max(abs(a - b) / (1 + abs(b)) for a, b in zip(got, expected, strict=True))
            worst[name] = max(worst.get(name, 0.0), apart)
            if name == "gae":
                targets = gae(samples, options["gamma"], options["lam"], options["across"])[1]
                pairs = zip(
                    (r for s in made for r in s.returns or ()),
                    (v for row in targets for v in row),
                    strict=True,
                )
                worst["gae's targets"] = max(
                    worst.get("gae's targets", 0.0), *(abs(a - b) / (1 + abs(b)) for a, b in pairs)
                )
    return worst
