"""Advantage estimators against values computed by hand."""

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

# Options of Dr. MAS that decide whose mean is subtracted
TEAM_MEAN = {"peers": "task", "vote": "trajectory"}
AGENT_MEAN = {"peers": "agent", "vote": "turn"}


def two_scales() -> Turns:
    """Return the turns of two trajectories in which the agents' rewards have different scales.

    The solver gets 0 or 1, the verifier 4 or 5. The verifier speaks three times in trajectory a and once in b.
    """
    return make_turns(
        [
            {"trajectory": "a", "turn": 0, "agent": "solver", "score": 1},
            {"trajectory": "a", "turn": 1, "agent": "verifier", "score": 5},
            {"trajectory": "a", "turn": 2, "agent": "verifier", "score": 5},
            {"trajectory": "a", "turn": 3, "agent": "verifier", "score": 5},
            {"trajectory": "b", "turn": 0, "agent": "solver", "score": 0},
            {"trajectory": "b", "turn": 1, "agent": "verifier", "score": 4},
        ]
    )


def one_group(*scores: float) -> Turns:
    """Return one turn of one agent in a trajectory for each score."""
    return make_turns([{"trajectory": i, "score": score} for i, score in enumerate(scores)])


def test_drmas_compares_every_agent_with_itself() -> None:
    advantages = ESTIMATORS["drmas"](two_scales()).values.tolist()
    # The solver's votes 1 and 0 have μ = 1/2 and σ = √(1/2).
    assert advantages[0] == pytest.approx(0.5 / 0.5**0.5, rel=1e-5)
    assert advantages[4] == pytest.approx(-0.5 / 0.5**0.5, rel=1e-5)
    # The verifier's votes 5, 5, 5 and 4 have μ = 4.75 and σ = 1/2.
    assert advantages[1:4] == pytest.approx([0.5] * 3, rel=1e-5)
    assert advantages[5] == pytest.approx(-1.5, rel=1e-5)


def test_grpo_gives_every_turn_the_advantage_of_its_trajectory() -> None:
    # The votes are a = (1 + 5 + 5 + 5) / 4 = 4 and b = (0 + 4) / 2 = 2, with μ = 3 and σ = √2.
    advantages = ESTIMATORS["grpo"](two_scales()).values.tolist()
    assert advantages == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)] * 2, rel=1e-5)
    # With n instead of n - 1 in the denominator, σ = 1.
    advantages = ESTIMATORS["grpo"](two_scales(), ddof=0, eps=0.0).values.tolist()
    assert advantages == [1.0] * 4 + [-1.0] * 2


def test_dr_grpo_only_subtracts_the_mean() -> None:
    advantages = ESTIMATORS["dr_grpo"](two_scales()).values.tolist()
    assert advantages == pytest.approx([1.0] * 4 + [-1.0] * 2)


def test_the_four_variants_of_drmas_table_3() -> None:
    turns = two_scales()

    def advantages(mean: dict[str, str], std: str) -> list[float]:
        return drmas(turns, **mean, std=std, eps=0.0).values.tolist()

    team_std = 2**0.5  # of the trajectories
    solver_std = 0.5**0.5  # of the solver's turns
    verifier_std = 0.5  # of the verifier's turns

    # μ and σ of the team are GRPO.
    grpo = ESTIMATORS["grpo"](turns, eps=0.0).values.tolist()
    assert advantages(TEAM_MEAN, "team") == pytest.approx(grpo)
    # μ of the agent and σ of the team: turns minus the agent's mean, over the deviation of trajectories
    differences = [0.5, 0.25, 0.25, 0.25, -0.5, -0.75]
    expected = [difference / team_std for difference in differences]
    assert advantages(AGENT_MEAN, "team") == pytest.approx(expected)
    # μ of the team and σ of the agent: trajectories minus the task's mean, over the deviation of turns
    expected = [1 / solver_std, *[1 / verifier_std] * 3, -1 / solver_std, -1 / verifier_std]
    assert advantages(TEAM_MEAN, "agent") == pytest.approx(expected)
    # μ and σ of the agent
    expected = [0.5 / solver_std, 0.5, 0.5, 0.5, -0.5 / solver_std, -1.5]
    assert advantages(AGENT_MEAN, "agent") == pytest.approx(expected)


def test_votes_that_do_not_differ_have_a_sigma_of_one() -> None:
    """Division by ε alone gave advantages of ±7.5e5 and ±5e4 in Table 3's mixed variants."""
    # The trajectories 0, 1, 1, 1 have μ = 3/4. The searcher has one vote, or three equal ones.
    verifier = [{"trajectory": i, "agent": "verifier", "score": float(i > 0)} for i in range(4)]
    for searcher_turns in ((1,), (1, 2, 3)):
        searcher = [
            {"trajectory": 0, "agent": "searcher", "turn": turn, "score": 0.0}
            for turn in searcher_turns
        ]
        advantages = drmas(make_turns(verifier + searcher), **TEAM_MEAN, std="agent").values
        assert advantages[4:].tolist() == pytest.approx([-0.75] * len(searcher), rel=1e-5)

    # Turns with 1 and 0.9 (a penalty) in one trajectory, or in two with equal means
    pair = [{"turn": 0, "score": 1.0}, {"turn": 1, "score": 0.9}]
    two_pairs = pair + [{**row, "trajectory": 1} for row in pair]
    for rows in (pair, two_pairs):
        advantages = drmas(make_turns(rows), **AGENT_MEAN, std="team").values
        assert advantages.tolist() == pytest.approx([0.05, -0.05] * (len(rows) // 2), rel=1e-5)

    # 0.1 + 0.2 and 0.3 differ by a rounding error of 6e-17, which is no difference.
    almost_equal = [
        {"trajectory": 0, "agent": "a", "score": 0.1 + 0.2},
        {"trajectory": 1, "agent": "a", "score": 0.3},
    ]
    different = [{"trajectory": i, "agent": "b", "turn": 1, "score": 2.0 * i} for i in range(2)]
    advantages = drmas(make_turns(almost_equal + different), **TEAM_MEAN, std="agent").values
    assert float(advantages.abs().max()) < 1.0


def test_at_grpo_compares_the_branches_of_one_state() -> None:
    # The second round continues from branch 2. In this round agent b acts in another state.
    turns = make_turns(
        [
            {"node": "0", "state": "s0", "score": 0.0},
            {"node": "1", "state": "s0", "score": 1.0},
            {"node": "2", "state": "s0", "score": 2.0},
            {"node": "2.0", "state": "s1", "turn": 1, "score": 5.0},
            {"node": "2.1", "state": "s1", "turn": 1, "score": 5.0},
            {"node": "2.2", "state": "s1", "turn": 1, "score": 8.0},
            {"node": "2.0", "state": "s2", "turn": 2, "agent": "b", "score": 1.0},
            {"node": "2.1", "state": "s2", "turn": 2, "agent": "b", "score": 2.0},
        ]
    )
    advantages = ESTIMATORS["at_grpo"](turns, eps=0.0).values.tolist()
    assert advantages[:3] == pytest.approx([-1.0, 0.0, 1.0])  # μ = 1, σ = 1
    std = 3**0.5  # √((1 + 1 + 4) / 2), with μ = 6
    assert advantages[3:6] == pytest.approx([-1 / std, -1 / std, 2 / std])
    assert advantages[6:] == pytest.approx([-(0.5**0.5), 0.5**0.5])  # μ = 1.5, σ = √(1/2)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    advantages = ESTIMATORS["rloo"](one_group(1.0, 2.0, 6.0)).values.tolist()
    assert advantages == pytest.approx([1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2])


def test_c3_compares_a_reply_with_the_other_replies_to_its_prompt() -> None:
    turns = make_turns(
        [
            {"trajectory": 0, "turn": 0, "score": 3.0},
            {"trajectory": 0, "turn": 0, "node": "1", "score": 7.0},
            {"trajectory": 0, "turn": 0, "node": "2", "score": 5.0},
            {"trajectory": 0, "turn": 1, "agent": "b", "score": 3.0},
            {"trajectory": 0, "turn": 1, "agent": "b", "node": "1", "score": 2.5},
            {"trajectory": 0, "turn": 2, "score": 3.0},  # without alternatives
            {"trajectory": 1, "turn": 0, "score": 0.3},  # another prompt, though of the same task
            {"trajectory": 1, "turn": 0, "node": "1", "score": 0.3},
            {"trajectory": 1, "turn": 0, "node": "2", "score": 0.3},
        ]
    )
    advantages = ESTIMATORS["c3"](turns).values.tolist()
    assert advantages[:3] == pytest.approx([3 - 12 / 2, 7 - 8 / 2, 5 - 10 / 2])
    assert advantages[3:5] == [0.5, -0.5]
    assert advantages[5:] == [0.0] * 4  # exactly 0 where the outcomes are equal


def test_grpo_passk_rewards_only_the_best_trajectory_by_its_lead() -> None:
    turns = make_turns(
        [
            {"task": "t", "trajectory": 0, "score": 1.0},
            {"task": "t", "trajectory": 1, "score": 4.0},
            {"task": "t", "trajectory": 2, "score": 2.0},
            {"task": "two are best", "trajectory": 3, "score": 7.0},
            {"task": "two are best", "trajectory": 4, "score": 7.0},
            {"task": "one trajectory", "trajectory": 5, "score": 9.0},
        ]
    )
    mean = 7 / 3
    std = (((1 - mean) ** 2 + (4 - mean) ** 2 + (2 - mean) ** 2) / 2) ** 0.5
    advantages = ESTIMATORS["grpo_passk"](turns, eps=0.0001).values.tolist()
    assert advantages == pytest.approx([0.0, 2 / (std + 0.0001), 0.0, 0.0, 0.0, 0.0])


def test_peers_vote_and_baseline_are_options_of_every_relative_estimator() -> None:
    turns = two_scales()
    # RLOO by agent subtracts the mean of the agent's other turns: for the verifier 5 - (5 + 5 + 4) / 3.
    rloo = ESTIMATORS["rloo"](turns, **AGENT_MEAN).values.tolist()
    assert rloo == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3, -1.0, -1.0])
    # Dr. MAS without σ subtracts only the agent's mean.
    without_std = drmas(turns, std="none").values.tolist()
    assert without_std == pytest.approx([0.5, 0.25, 0.25, 0.25, -0.5, -0.75])
    # pass@k by agent: the solver leads with 1 against 0, the verifier with 5 against 4.
    passk = ESTIMATORS["grpo_passk"](turns, peers="agent", std="none").values.tolist()
    assert passk == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])

    # GiGPO by agent compares 1 with 0 and 5 with 3. No two turns share a state.
    different_states = make_turns(
        [
            {"trajectory": "a", "turn": 0, "agent": "x", "score": 1, "state": "a0"},
            {"trajectory": "a", "turn": 1, "agent": "y", "score": 5, "state": "a1"},
            {"trajectory": "b", "turn": 0, "agent": "x", "score": 0, "state": "b0"},
            {"trajectory": "b", "turn": 1, "agent": "y", "score": 3, "state": "b1"},
        ],
        step_rewards=[[0.0]] * 4,
    )
    by_agent = gigpo(different_states, peers="agent", std="none").values.tolist()
    assert by_agent == pytest.approx([0.5, 1.0, -0.5, -1.0])
    # By task, the trajectories have the means 3 and 1.5.
    by_task = gigpo(different_states, std="none").values.tolist()
    assert by_task == pytest.approx([0.75, 0.75, -0.75, -0.75])


def test_a_long_trajectory_does_not_set_the_baseline_of_reinforce_pp() -> None:
    """One turn succeeds and five turns of one trajectory fail.

    The baseline is 1/2 by trajectories, as in the published code, and 1/6 by turns.
    """
    succeeded = [{"trajectory": "a", "score": 1.0}]
    failed = [{"trajectory": "b", "turn": turn, "score": 0.0} for turn in range(5)]
    turns = make_turns(succeeded + failed)
    estimator = ESTIMATORS["reinforce_pp_baseline"]
    one_group = torch.zeros(6, dtype=torch.int64)
    for vote, baseline in (("trajectory", 1 / 2), ("turn", 1 / 6)):
        advantages = estimator(turns, vote=vote)
        centred = torch.tensor([1 - baseline, *[-baseline] * 5], dtype=torch.float64)
        expected = whiten(centred, one_group).tolist()
        assert advantages.values.tolist() == pytest.approx(expected)
        assert float(advantages.groups["peers"].mean[0]) == pytest.approx(baseline)
    assert estimator(turns).groups["peers"].mean.tolist() == [0.5] * 6  # by trajectories by default


def test_m_grpo_counts_each_call_of_a_sub_agent_as_a_vote() -> None:
    """In the released code (AQ-MedAI/MrlX) every call is a sample with its own reward."""
    turns = make_turns(
        [
            {"trajectory": "a", "agent": "main", "score": 1.0},
            {"trajectory": "b", "agent": "main", "score": 0.0},
            {"trajectory": "a", "agent": "sub", "turn": 1, "score": 2.0},
            {"trajectory": "a", "agent": "sub", "turn": 2, "score": 4.0},
            {"trajectory": "b", "agent": "sub", "turn": 1, "score": 0.0},
        ]
    )
    half = 0.5**0.5
    # The calls 2, 4 and 0 have μ = 2 and σ = 2.
    by_call = ESTIMATORS["m_grpo"](turns, eps=0.0).values.tolist()
    assert by_call == pytest.approx([half, -half, 0, 1, -1])
    # By trajectory, the calls of a are one vote of 3 against 0.
    by_trajectory = ESTIMATORS["m_grpo"](turns, eps=0.0, vote="trajectory").values.tolist()
    assert by_trajectory == pytest.approx([half, -half, half, half, -half])


def test_remax_subtracts_the_greedy_outcome() -> None:
    turns = replace(one_group(1.0, 0.0), greedy_rewards=torch.tensor([0.25, 0.25]).double())
    assert ESTIMATORS["remax"](turns).values.tolist() == [0.75, -0.25]


def test_gigpo_adds_the_advantage_among_turns_with_equal_states() -> None:
    # Both trajectories start in state x. Their second rounds have different states.
    rows = [
        {"trajectory": "a", "turn": 0, "round": 0, "state": "x", "score": 1.0},
        {"trajectory": "a", "turn": 1, "round": 1, "state": "y", "score": 1.0},
        {"trajectory": "b", "turn": 0, "round": 0, "state": "x", "score": 0.0},
        {"trajectory": "b", "turn": 1, "round": 1, "state": "z", "score": 0.0},
    ]
    turns = make_turns(rows, step_rewards=[[0.0, 1.0], [1.0, 0.0], [0.5, 0.0], [0.0, 0.0]])
    assert discounted_returns(turns, 0.5).tolist() == [0.5, 1.0, 0.5, 0.0]
    # The votes 1 and 0 of the trajectories give ±1/2. With γ = 1/2 both returns in state x are 1/2, so
    # that they add nothing.
    advantages = gigpo(turns, std="none", step=StepCredit(gamma=0.5)).values.tolist()
    assert advantages == [0.5, 0.5, -0.5, -0.5]
    # With γ = 1 the returns in state x are 1 and 1/2, which adds ±1/4 times the weight of 2.
    advantages = gigpo(turns, std="none", step=StepCredit(gamma=1.0, weight=2.0)).values.tolist()
    assert advantages == [1.0, 0.5, -1.0, -0.5]


def test_gigpo_joins_the_states_of_similar_prompts() -> None:
    rows = [{"trajectory": t, "state": t, "score": 0.0} for t in ("a", "b")]
    turns = make_turns(rows, step_rewards=[[1.0], [0.0]])
    assert gigpo(turns, std="none").values.tolist() == [0.0, 0.0]

    similarities = []

    def join_all_states(similarity: float) -> torch.Tensor:
        similarities.append(similarity)
        return torch.tensor([0, 0])

    step = StepCredit(similarity=0.9)
    clustered = replace(turns, cluster_states=join_all_states)
    assert gigpo(clustered, std="none", step=step).values.tolist() == [0.5, -0.5]
    assert similarities == [0.9]
    with pytest.raises(ValueError, match=r"^gigpo: step\.similarity below 1 needs the prompts"):
        gigpo(turns, step=step)


def tree() -> Turns:
    """Return a tree: root 0 (score 1) has a child with 5, root 1 (score 3) has children with 2, 4 and 9."""
    scores = {"0": 1.0, "1": 3.0, "1.0": 2.0, "1.1": 4.0, "1.2": 9.0, "0.0": 5.0}
    return make_turns(
        [{"node": node, "turn": node.count("."), "score": score} for node, score in scores.items()]
    )


def test_the_tree_baseline_mixes_parent_and_siblings() -> None:
    siblings, baseline = tree_baseline(tree(), lam=0.25)
    assert siblings.score.tolist() == [1.0, 3.0, 2.0, 4.0, 9.0, 5.0]
    assert baseline.tolist() == [
        3.0,  # a root: the other root
        1.0,
        0.75 * 3 + 0.25 * (4 + 9) / 2,  # a child: the parent and the mean of the siblings
        0.75 * 3 + 0.25 * (2 + 9) / 2,
        0.75 * 3 + 0.25 * (2 + 4) / 2,
        1.0,  # an only child: its parent
    ]
    advantages = ESTIMATORS["mcts"](tree(), lam=0.25).values
    assert advantages.tolist() == (siblings.score - baseline).tolist()


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
        assert ESTIMATORS[name](one_group(0.7)).values.tolist() == [0.0]
        assert ESTIMATORS[name](one_group(0.7), lone="raw").values.tolist() == [0.7]


def test_a_trajectorys_vote_counts_once_in_each_agents_group() -> None:
    grouping = Grouping(peer_columns=("task", "agent"), vote_columns=("trajectory",))
    statistics = grouping.statistics(two_scales())
    assert statistics.size.tolist() == [2] * 6  # both trajectories are in both agents' groups
    assert statistics.mean.tolist() == [3.0] * 6


def test_an_estimator_returns_the_groups_that_it_compared() -> None:
    turns = replace(two_scales(), step_rewards=torch.zeros(6, 1).double())
    groupings = {}
    for name in sorted(set(ESTIMATORS) - AGENT_LOCAL_ESTIMATORS):
        groups = ESTIMATORS[name](turns).groups
        groupings[name] = {
            kind: (group.grouping.peer_columns, group.grouping.vote_columns)
            for kind, group in groups.items()
        }
    turn = ("trajectory", "node", "turn")
    team = (("task",), ("trajectory",))
    assert groupings == {
        "at_grpo": {"peers": (("task", "state", "agent", "turn"), turn)},
        "c3": {"replies": (("trajectory", "turn"), turn)},
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
    # The mean is of the agent's turns, and σ of the trajectories 4 and 2.
    groups = drmas(turns, **AGENT_MEAN, std="team", ddof=0).groups
    assert groups["mean"].mean.tolist() == [0.5, 4.75, 4.75, 4.75, 0.5, 4.75]
    assert groups["std"].std.tolist() == [1.0] * 6
