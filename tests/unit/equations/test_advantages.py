"""Every estimator, by hand and by the properties that make it what it is."""

from dataclasses import replace

import pytest
import torch

from mcore_mas.equations.advantages import (
    AGENT_LOCAL_ESTIMATORS,
    ESTIMATORS,
    StepCredit,
    discounted_returns,
    gigpo,
    tree_baseline,
    whiten,
)
from mcore_mas.equations.turns import Grouping, Turns
from tests.support.turns import make_turns

drmas = ESTIMATORS["drmas"]
TEAM = {"peers": "task", "vote": "trajectory"}  # of μ; σ is `std`'s
AGENT = {"peers": "agent", "vote": "turn"}


def two_scales() -> Turns:
    """The verifier speaks three times in one trajectory and once in the other; its rewards are 4 to 5, not 0 to 1."""
    said = [("a", "solver", 1), ("a", "verifier", 5), ("a", "verifier", 5), ("a", "verifier", 5)]
    said += [("b", "solver", 0), ("b", "verifier", 4)]
    place = [0, 1, 2, 3, 0, 1]
    return make_turns(
        [
            {"trajectory": trajectory, "agent": agent, "score": score, "turn": turn}
            for (trajectory, agent, score), turn in zip(said, place, strict=True)
        ]
    )


def group(*scores: float) -> Turns:
    """One turn of one agent in a trajectory each."""
    return make_turns([{"trajectory": i, "score": score} for i, score in enumerate(scores)])


def test_drmas_compares_every_agent_with_itself() -> None:
    got = ESTIMATORS["drmas"](two_scales()).values.tolist()
    # solver: votes 1, 0: μ 1/2, σ √(1/2).  verifier: votes 5, 5, 5, 4: μ 4.75, σ 1/2
    assert got[0] == pytest.approx(0.5 / 0.5**0.5, rel=1e-5)
    assert got[4] == pytest.approx(-0.5 / 0.5**0.5, rel=1e-5)
    assert got[1:4] == pytest.approx([0.5] * 3, rel=1e-5)
    assert got[5] == pytest.approx(-1.5, rel=1e-5)


def test_grpo_gives_every_turn_the_value_of_its_trajectory() -> None:
    # votes: a = (1 + 5 + 5 + 5) / 4 = 4, b = (0 + 4) / 2 = 2: μ 3, σ √2
    got = ESTIMATORS["grpo"](two_scales()).values.tolist()
    assert got == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)] * 2, rel=1e-5)
    # σ over n instead of n - 1 is 1
    assert (
        ESTIMATORS["grpo"](two_scales(), ddof=0, eps=0.0).values.tolist() == [1.0] * 4 + [-1.0] * 2
    )


def test_dr_grpo_only_centres() -> None:
    assert ESTIMATORS["dr_grpo"](two_scales()).values.tolist() == pytest.approx(
        [1.0] * 4 + [-1.0] * 2
    )


def test_the_four_variants_of_drmas_table_3() -> None:
    turns = two_scales()
    got = {
        (mean, std): drmas(turns, **of, std=std, eps=0.0).values
        for mean, of in (("agent", AGENT), ("team", TEAM))
        for std in ("agent", "team")
    }
    team, solver, verifier = (
        2**0.5,
        0.5**0.5,
        0.5,
    )  # the three σ: of trajectories, of the solver's, the verifier's turns
    assert got["team", "team"].tolist() == pytest.approx(
        ESTIMATORS["grpo"](turns, eps=0.0).values.tolist()
    )
    # (μ_k, σ): the turn against its agent's mean, over the deviation of trajectories
    assert got["agent", "team"].tolist() == pytest.approx(
        [v / team for v in (0.5, 0.25, 0.25, 0.25, -0.5, -0.75)]
    )
    # (μ, σ_k): the trajectory against the task's mean, over the deviation of the agent's turns
    assert got["team", "agent"].tolist() == pytest.approx(
        [1 / solver, 1 / verifier, 1 / verifier, 1 / verifier, -1 / solver, -1 / verifier]
    )
    assert got["agent", "agent"].tolist() == pytest.approx(
        [0.5 / solver, 0.5, 0.5, 0.5, -0.5 / solver, -1.5]
    )


def test_d1_votes_that_do_not_differ_have_a_sigma_of_one() -> None:
    """The numbers of Table 3's mixed variants that were ±7.5e5 and ±5e4: r - μ over ε alone."""
    four = [{"trajectory": i, "agent": "verifier", "score": float(i > 0)} for i in range(4)]
    rare = [{"trajectory": 0, "agent": "searcher", "turn": 1, "score": 0.0}]
    # μ of the trajectories 0, 1, 1, 1 is 3/4; the searcher has one vote, or three equal ones
    for turns in (four + rare, four + [row | {"turn": 1 + i} for i in range(3) for row in rare]):
        got = drmas(make_turns(turns), **TEAM, std="agent").values
        assert got[4:].tolist() == pytest.approx([-0.75] * (len(turns) - 4), rel=1e-5)
    # one completed trajectory of turns with 1 and 0.9 (a penalty): σ of one trajectory; and of two of equal means
    pair = [{"turn": i, "score": score} for i, score in enumerate((1.0, 0.9))]
    twice = pair + [row | {"trajectory": 1} for row in pair]
    for rows in (pair, twice):
        got = drmas(make_turns(rows), **AGENT, std="team").values
        assert got.tolist() == pytest.approx([0.05, -0.05] * (len(rows) // 2), rel=1e-5)
    # rounding is no difference: 0.1 + 0.2 and 0.3 differ by 6e-17
    close = [
        {"trajectory": i, "agent": "a", "score": score} for i, score in enumerate((0.1 + 0.2, 0.3))
    ]
    other = [{"trajectory": i, "agent": "b", "turn": 1, "score": 2.0 * i} for i in range(2)]
    assert float(drmas(make_turns(close + other), **TEAM, std="agent").values.abs().max()) < 1.0


def test_at_grpo_compares_the_branches_of_one_state() -> None:
    rows = [
        {"node": str(b), "state": "s0", "score": score} for b, score in enumerate((0.0, 1.0, 2.0))
    ]
    # the second round goes on from branch 2; another agent acts in the same round from a state of its own
    rows += [
        {"node": f"2.{b}", "state": "s1", "turn": 1, "score": score}
        for b, score in enumerate((5.0, 5.0, 8.0))
    ]
    rows += [
        {"node": f"2.{b}", "state": "s2", "turn": 2, "agent": "b", "score": score}
        for b, score in enumerate((1.0, 2.0))
    ]
    got = ESTIMATORS["at_grpo"](make_turns(rows), eps=0.0).values.tolist()
    # σ: 1; √((1 + 1 + 4) / 2) = √3; √(1/2)
    assert got == pytest.approx(
        [-1.0, 0.0, 1.0, -1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5, -(0.5**0.5), 0.5**0.5]
    )


def test_rloo_leaves_one_out() -> None:
    # each against the mean of the other two
    assert ESTIMATORS["rloo"](group(1.0, 2.0, 6.0)).values.tolist() == pytest.approx(
        [-3.0, -1.5, 4.5]
    )


def test_only_the_best_of_k_is_rewarded_by_its_lead() -> None:
    turns = make_turns(
        [{"task": "t", "trajectory": i, "score": s} for i, s in enumerate((1.0, 4.0, 2.0))]
        + [{"task": "u", "trajectory": 3 + i, "score": s} for i, s in enumerate((7.0, 7.0))]
        + [{"task": "v", "trajectory": 5, "score": 9.0}]
    )
    sigma = (((1 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2) / 2) ** 0.5
    got = ESTIMATORS["grpo_passk"](turns, eps=0.0001).values.tolist()
    assert got == pytest.approx([0.0, 2 / (sigma + 0.0001), 0.0, 0.0, 0.0, 0.0])


def test_d6_peers_vote_and_baseline_are_options_of_every_relative_estimator() -> None:
    turns = two_scales()
    # agent-wise RLOO: each turn against the mean of the agent's other turns. Verifier: 5 against (5 + 5 + 4) / 3
    rloo = ESTIMATORS["rloo"](turns, **AGENT).values.tolist()
    assert rloo == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3, -1.0, -1.0])
    # the agent's mean without σ
    assert drmas(turns, std="none").values.tolist() == pytest.approx(
        [0.5, 0.25, 0.25, 0.25, -0.5, -0.75]
    )
    # pass@k among an agent's trajectories: solver 1 against 0; verifier 5 against 4; the lead alone, without σ
    passk = ESTIMATORS["grpo_passk"](turns, peers="agent", std="none").values.tolist()
    assert passk == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    # GiGPO by agent: episode 1, 5 against 0, 4 of each agent; nobody shares a state in this one
    alone = make_turns([
        {"trajectory": t, "agent": a, "turn": i, "score": s, "state": f"{t}{i}"}
        for t, i, a, s in [("a", 0, "x", 1), ("a", 1, "y", 5), ("b", 0, "x", 0), ("b", 1, "y", 3)]
    ], steps=[[0.0]] * 4)  # fmt: skip
    got = gigpo(alone, peers="agent", std="none").values.tolist()
    assert got == pytest.approx([0.5, 1.0, -0.5, -1.0])
    assert gigpo(alone, std="none").values.tolist() == pytest.approx([0.75, 0.75, -0.75, -0.75])


def test_d6_a_long_trajectory_does_not_set_the_baseline_of_reinforce_pp() -> None:
    """One turn that succeeds and five that fail: the baseline is 1/2 by trajectories (the seeds), 1/6 by turns."""
    rows = [{"trajectory": "a", "score": 1.0}] + [
        {"trajectory": "b", "turn": i, "score": 0.0} for i in range(5)
    ]
    estimator = ESTIMATORS["reinforce_pp_baseline"]
    for vote, centred in (("trajectory", [0.5] + [-0.5] * 5), ("turn", [5 / 6] + [-1 / 6] * 5)):
        made = estimator(make_turns(rows), vote=vote)
        wanted = whiten(
            torch.tensor(centred, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
        )
        assert made.values.tolist() == pytest.approx(wanted.tolist())
        assert float(made.groups["peers"].mean[0]) == pytest.approx(1 - centred[0])
    assert estimator(make_turns(rows)).groups["peers"].mean.tolist() == [0.5] * 6


def test_m_grpo_takes_each_call_of_a_sub_agent_as_a_vote() -> None:
    """As the released code (AQ-MedAI/MrlX): every call is a sample with a reward of its own."""
    rows = [
        {"trajectory": "a", "agent": "main", "score": 1.0},
        {"trajectory": "b", "agent": "main", "score": 0.0},
    ]
    rows += [
        {"trajectory": "a", "agent": "sub", "turn": i, "score": s} for i, s in ((1, 2.0), (2, 4.0))
    ]
    rows += [{"trajectory": "b", "agent": "sub", "turn": 1, "score": 0.0}]
    half = 0.5**0.5
    # main: 1, 0.  sub: 2, 4, 0 with mean 2 and σ 2
    assert ESTIMATORS["m_grpo"](make_turns(rows), eps=0.0).values.tolist() == pytest.approx(
        [half, -half, 0, 1, -1]
    )
    # by trajectories, a's calls are one vote of 3 against 0
    got = ESTIMATORS["m_grpo"](make_turns(rows), eps=0.0, vote="trajectory").values.tolist()
    assert got == pytest.approx([half, -half, half, half, -half])


def test_remax_subtracts_the_greedy_outcome() -> None:
    turns = replace(group(1.0, 0.0), greedy=torch.tensor([0.25, 0.25]).double())
    assert ESTIMATORS["remax"](turns).values.tolist() == [0.75, -0.25]


def test_gigpo_adds_the_step_advantage_among_equal_states() -> None:
    # two trajectories of two rounds; both start at state x, the second rounds differ
    rows = [
        {"trajectory": "a", "turn": 0, "round": 0, "state": "x", "score": 1.0},
        {"trajectory": "a", "turn": 1, "round": 1, "state": "y", "score": 1.0},
        {"trajectory": "b", "turn": 0, "round": 0, "state": "x", "score": 0.0},
        {"trajectory": "b", "turn": 1, "round": 1, "state": "z", "score": 0.0},
    ]
    turns = make_turns(rows, steps=[[0.0, 1.0], [1.0, 0.0], [0.5, 0.0], [0.0, 0.0]])
    assert discounted_returns(turns, 0.5).tolist() == [0.5, 1.0, 0.5, 0.0]
    # episode: votes 1, 0 centred; step: x has returns 0.5 and 0.5, the other states are alone
    assert gigpo(turns, std="none", step=StepCredit(gamma=0.5)).values.tolist() == [
        0.5,
        0.5,
        -0.5,
        -0.5,
    ]
    # with γ = 1 the returns at x are 1 and 0.5
    assert gigpo(turns, std="none", step=StepCredit(gamma=1.0, weight=2.0)).values.tolist() == [
        1.0,
        0.5,
        -1.0,
        -0.5,
    ]


def test_gigpo_joins_states_that_are_alike() -> None:
    rows = [{"trajectory": t, "state": t, "score": 0.0} for t in ("a", "b")]
    turns = make_turns(rows, steps=[[1.0], [0.0]])
    assert gigpo(turns, std="none").values.tolist() == [0.0, 0.0]
    asked = []

    def alike(similarity: float) -> torch.Tensor:
        asked.append(similarity)
        return torch.tensor([0, 0])

    step = StepCredit(similarity=0.9)
    assert gigpo(replace(turns, cluster_states=alike), std="none", step=step).values.tolist() == [
        0.5,
        -0.5,
    ]
    assert asked == [0.9]
    with pytest.raises(ValueError, match=r"^gigpo: step\.similarity below 1 needs the texts"):
        gigpo(turns, step=step)


def tree() -> Turns:
    """Roots 0 (score 1) and 1 (score 3); 1 has children with scores 2, 4, 9; 0 has one with score 5."""
    nodes = {"0": 1.0, "1": 3.0, "1.0": 2.0, "1.1": 4.0, "1.2": 9.0, "0.0": 5.0}
    return make_turns(
        [{"node": node, "turn": node.count("."), "score": score} for node, score in nodes.items()]
    )


def test_the_tree_baseline_mixes_parent_and_siblings() -> None:
    siblings, baseline = tree_baseline(tree(), lam=0.25)
    assert siblings.score.tolist() == [1.0, 3.0, 2.0, 4.0, 9.0, 5.0]
    # roots: the other root; children of 1: 0.75 * 3 + 0.25 * mean of the other two; the only child: its parent
    assert baseline.tolist() == [3.0, 1.0, 2.25 + 1.625, 2.25 + 1.375, 2.25 + 0.75, 1.0]
    assert (
        ESTIMATORS["mcts"](tree(), lam=0.25).values.tolist() == (siblings.score - baseline).tolist()
    )


def test_mars2_standardises_shaped_rewards_over_the_tree() -> None:
    siblings, baseline = tree_baseline(tree(), lam=0.5)
    shaped = siblings.score + 0.3 * (siblings.score - baseline)
    expected = (shaped - shaped.mean()) / (shaped.std() + 1e-6)
    assert ESTIMATORS["mars2"](tree()).values.tolist() == pytest.approx(expected.tolist())


def test_a_lone_vote_is_zero_or_raw() -> None:
    rows = [{"agent": "solver", "score": 0.7}, {"agent": "verifier", "turn": 1, "score": 0.2}]
    assert ESTIMATORS["drmas"](make_turns(rows)).values.tolist() == [0.0, 0.0]
    assert ESTIMATORS["drmas"](make_turns(rows), lone="raw").values.tolist() == [0.7, 0.2]
    for name in ("grpo", "dr_grpo", "rloo"):
        assert ESTIMATORS[name](group(0.7)).values.tolist() == [0.0]
        assert ESTIMATORS[name](group(0.7), lone="raw").values.tolist() == [0.7]


def test_a_vote_counts_once_in_each_of_its_groups() -> None:
    b = Grouping(peers=("task", "agent"), vote=("trajectory",)).statistics(two_scales())
    assert b.size.tolist() == [2] * 6  # two trajectories in both agents' groups
    assert b.mean.tolist() == [3.0] * 6


def test_an_estimator_says_whom_it_compared() -> None:
    turns = replace(two_scales(), steps=torch.zeros(6, 1).double())
    compared = {
        name: {
            of: (group.grouping.peers, group.grouping.vote)
            for of, group in ESTIMATORS[name](turns).groups.items()
        }
        for name in sorted(set(ESTIMATORS) - AGENT_LOCAL_ESTIMATORS)
    }
    turn, team = ("trajectory", "node", "turn"), (("task",), ("trajectory",))
    assert compared == {
        "at_grpo": {"peers": (("task", "state", "agent", "turn"), turn)},
        "dr_grpo": {"peers": team},
        "drmas": {"peers": (("task", "agent"), turn)},
        "gigpo": {"episode": team, "step": (("task", "state"), turn)},
        "grpo": {"peers": team},
        "grpo_passk": {"peers": team},
        "m_grpo": {"peers": (("task", "agent"), turn)},
        "mars2": {"tree": (("trajectory",), ("trajectory", "node"))},
        "mcts": {"siblings": (("trajectory", "parent"), ("trajectory", "node"))},
        "reinforce_pp": {},
        "reinforce_pp_baseline": {"peers": team},
        "rloo": {"peers": team},
    }
    both = drmas(turns, **AGENT, std="team", ddof=0).groups
    assert both["mean"].mean.tolist() == [0.5] + [4.75] * 3 + [0.5, 4.75]
    assert both["std"].std.tolist() == [1.0] * 6  # of the trajectories' 4 and 2
