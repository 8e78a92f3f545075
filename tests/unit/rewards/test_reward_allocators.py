"""Every allocator's numbers, done by hand."""

from dataclasses import replace

import pytest

from rollout.rewards import ALLOCATORS
from rollout.rewards.allocation import RewardError
from tests.support.played import failed, group, rewards, trajectory, turn


def line(*turns, outcome=1.0, **fields):
    """Return a trajectory with a turn for each agent, which may be given with its scores."""
    pairs = [(one, {}) if isinstance(one, str) else one for one in turns]
    return trajectory(
        *(turn(i, agent, scores) for i, (agent, scores) in enumerate(pairs)),
        outcome=outcome,
        **fields,
    )


def local(*values, agents="abcdef"):
    return [(agent, {"local": value}) for agent, value in zip(agents, values, strict=False)]


def f1(*turns):
    return [(agent, {} if value is None else {"f1": value}) for agent, value in turns]


def tree(*scores):
    """Return a tree trajectory whose turns have a node, an agent and scores."""
    turns = [
        turn(node.count("."), agent, turn_scores, node=node) for node, agent, turn_scores in scores
    ]
    return trajectory(*turns, leaf=scores[-1][0])


def local_tree(score_by_node):
    """Return a tree with one turn in each node, given the turn's score `local`."""
    return tree(*((node, "a", {"local": score}) for node, score in score_by_node.items()))


M_ASK = f1(  # planned answer 0.2, first answer 0.5, a round up to 0.8, a round down to 0.6, then the end
    ("planner", 0.2),
    ("answerer", 0.5),
    ("searcher", None),
    ("summariser", 0.8),
    ("updater", 0.8),
    ("answerer", 0.8),
    ("searcher", None),
    ("summariser", 0.6),
    ("updater", 0.6),
    ("answerer", 0.6),
    ("searcher", None),
)
M_ASK_ROLES = {
    "metric": "f1",
    "scored": ["planner", "answerer"],
    "absolute": ["planner", "answerer"],
}
CODE = f1(  # pass rates 0.25, 0.25, 1.0; the last reflection changes nothing
    ("planner", 0.25),
    ("coder", 0.25),
    ("reflector", 0.25),
    ("planner", 0.25),
    ("coder", 0.25),
    ("reflector", 1.0),
    ("planner", 1.0),
    ("coder", 1.0),
    ("reflector", None),
)
DEBATE = local(0.0, 1.0, 1.0, 0.5, agents="abab")  # two rounds
AGENTS = ("a", "a", "a", "b")
BRANCHES = tree(  # rounds that brought 0.5 and 2, then one of two turns that brought 3; "1" was credited later too
    ("0", "a", {"local": 1.0, "branch": 1.5}),
    ("1", "a", {"local": 0.0, "branch": 2.0, "team": 9.0}),
    ("1.0", "a", {"local": 1.0, "branch": 4.5, "team": 3.0}),
    ("1.0", "b", {"local": 0.5, "branch": 4.5, "team": 3.0}),
)

CASES = [
    ("shared_outcome", {}, line("a", "b", "a", outcome=0.5), [0.5, 0.5, 0.5]),
    # shares of R = 0.6
    ("shares", {}, line(*AGENTS, outcome=0.6), [0.6, 0.6, 0.6, 0.6]),
    ("shares", {"weights": {"b": 0.5}}, line(*AGENTS, outcome=0.6), [0.6, 0.6, 0.6, 0.3]),
    ("shares", {"split": "turns"}, line(*AGENTS, outcome=0.6), [0.15, 0.15, 0.15, 0.15]),
    (
        "shares",
        {"split": "turns", "weights": {"b": 3}},
        line(*AGENTS, outcome=0.6),
        [0.1, 0.1, 0.1, 0.3],
    ),
    ("shares", {"split": "agents"}, line(*AGENTS, outcome=0.6), [0.1, 0.1, 0.1, 0.3]),
    (
        "shares",
        {"split": "agents", "weights": {"b": 0}},
        line(*AGENTS, outcome=0.6),
        [0.2, 0.2, 0.2, 0.0],
    ),
    # the hops of a, b, a are 0, 1, 2, and their turns 0, 0, 1
    ("discounts", {"mode": "hop_weighted"}, line("a", "b", "a"), [0.1, 0.2, 0.3]),
    ("discounts", {"mode": "hop_weighted", "max_hops": 2}, line("a", "b", "a"), [0.5, 1.0, 1.0]),
    (
        "discounts",
        {"mode": "hop_discount", "gamma": 0.5, "max_hops": 2},
        line(*"abab"),
        [0.25, 0.5, 1.0, 1.0],
    ),
    (
        "discounts",
        {"mode": "turn_weighted", "max_turns": 4},
        line("a", "b", "a", outcome=2.0),
        [0.5, 0.5, 1.0],
    ),
    ("discounts", {"mode": "turn_weighted", "max_turns": 1}, line("a", "b", "a"), [1.0, 1.0, 1.0]),
    (
        "discounts",
        {"mode": "discount", "gamma": 0.5, "max_turns": 3},
        line("a", "b", "a"),
        [0.125, 0.125, 0.25],
    ),
    ("discounts", {"mode": "binary"}, line("a", outcome=0.6), [1.0]),
    ("discounts", {"mode": "binary"}, line("a", outcome=0.5), [0.0]),
    ("discounts", {"mode": "normalized"}, line("a", "b", outcome=-3.0), [-1.0, -1.0]),
    ("discounts", {"mode": "shaped", "max_turns": 2}, line("a", "a", outcome=1.5), [0.75, 1.0]),
    # 0.8 and 0.6 for the answers themselves, +0.3 and -0.2 for those who led to them
    (
        "turn_difference",
        M_ASK_ROLES,
        line(*M_ASK),
        [0.2, 0.5, 0.3, 0.3, 0.3, 0.8, -0.2, -0.2, -0.2, 0.6, 0.0],
    ),
    (
        "turn_difference",
        {"metric": "f1", "scored": ["coder"]},
        line(*CODE),
        [0.25, 0.25, 0, 0, 0, 0.75, 0.75, 0.75, 0],
    ),
    (
        "turn_difference",
        {"metric": "f1", "scored": ["coder"]},
        line("planner", "reflector"),
        [0.0, 0.0],
    ),
    # Q = 0 and R = 1 for the second of a; Q = 1 and R = 0.5 for the second of b
    ("shaping", {}, line(*DEBATE), [0.0, 1.0, 1.5, 0.25]),
    ("shaping", {"beta": 0.5}, line(*DEBATE), [0.5, 1.25, 2.0, 0.5]),
    ("shaping", {"formula": "quality"}, line(*DEBATE), [0.0, 1.0, 1.0, 0.75]),
    # Q = 0.5 for both in the second round
    ("shaping", {"history": "rounds"}, line(*DEBATE), [0.0, 1.0, 1.25, 0.5]),
    ("shaping", {"history": "rounds", "formula": "quality"}, line(*DEBATE), [0.0, 1.0, 1.25, 0.5]),
    # Q = 0, then 0.5, then 2/3
    ("shaping", {"history": "before", "alpha": 0.6}, line(*DEBATE), [0.0, 1.6, 1.3, 0.4]),
    (
        "shaping",
        {"history": "before", "alpha": 0.0, "beta": 2.0},
        line(*DEBATE),
        [1.0, 2.0, 2.0, 1.5],
    ),
    # Q = 0.75 for the aggregator c alone
    ("shaping", {"history": "proposers"}, line(*local(1.0, 0.5, 0.25)), [1.0, 0.5, 0.0]),
    ("shaping", {"measure": "f1"}, line(*f1(("a", 0.5), ("a", 1.0))), [0.5, 1.25]),
    (
        "local_team",
        {},
        line(("a", {"local": 0.5, "team": 1.0}), ("b", {"local": -1.0, "team": 0.25})),
        [1.5, -0.75],
    ),
    ("local_team", {"alpha": 0.5}, line(("a", {"local": 0.5, "team": 1.0})), [1.0]),
    ("local_team", {"missing_local": "zero"}, line(("a", {"team": 0.25})), [0.25]),
    ("local_team", {}, BRANCHES, [1.5, 2.0, 4.0, 3.5]),
    ("local_team", {"alpha": 0.5}, BRANCHES, [1.25, 1.0, 2.5, 2.0]),
    # "0": sibling 1 only, 0 + .3 (0 - 1); "1": sibling 0, 1 + .3; "1.0": (1 + .5) / 2 from parent 1 and sibling 0.5,
    # 1 + .3 (1 - .75); "1.1": (1 + 1) / 2, .5 + .3 (.5 - 1); "1.0.0": parent 1 only, 0 + .3 (0 - 1)
    (
        "tree_shaping",
        {},
        local_tree({"0": 0, "1": 1, "1.0": 1, "1.1": 0.5, "1.0.0": 0}),
        [-0.3, 1.3, 1.075, 0.35, -0.3],
    ),
    # baselines of 2.0, 2.1, 2.2: .25 of the parent 1 and .75 of .75, .5, .25 make .8125, .625, .4375
    (
        "tree_shaping",
        {"gamma": 0.5, "mix": 0.75},
        local_tree({"2": 1, "2.0": 0, "2.1": 0.5, "2.2": 1}),
        [1.0, -0.40625, 0.4375, 1.28125],
    ),
    # a root that spoke before the branching is everybody's parent, and has none
    (
        "tree_shaping",
        {"gamma": 1.0},
        trajectory(
            turn(0, scores={"local": 1.0}), turn(1, scores={"local": 3.0}, node="0"), leaf="0"
        ),
        [1.0, 5.0],
    ),
    ("coach", {}, line(("a", {"process": 7.0}), ("b", {"process": 0.0})), [7.0, 0.0]),
    ("coach", {}, line(("a", {"process": 7.0}), "b"), [7.0, None]),
    (
        "coach",
        {"scale": 0.1, "clip": [0, 0.5]},
        line(("a", {"process": 7.0}), ("b", {"process": 3.0})),
        [0.5, 0.3],
    ),
    ("coach", {"outcome_weight": 2.0}, line(("a", {"process": 7.0}), outcome=0.5), [8.0]),
    ("coach", {}, tree(("0", "a", {"process": 3.0}), ("1", "a", {})), [3.0, None]),
]


@pytest.mark.parametrize(("name", "options", "played", "expected"), CASES)
def test_rewards_by_hand(name, options, played, expected):
    (got,) = rewards(ALLOCATORS[name](group(played), **options))
    assert got == pytest.approx(expected, abs=1e-12)


def test_every_allocator_is_in_the_table():
    assert {name for name, *_ in CASES} | {"majority"} == set(ALLOCATORS)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["7", "8", "7"], [1.0, 0.0, 1.0]),
        (["8", "7", "7", "8"], [1.0, 0.0, 0.0, 1.0]),  # a tie goes to the first given
        (["", "", "7"], [0.0, 0.0, 1.0]),  # no answer has no vote
        (["", ""], [0.0, 0.0]),
    ],
)
def test_the_majority_is_right(answers, expected):
    played = [
        trajectory(turn(0), turn(1), sample=i, answer=a, outcome=0.0) for i, a in enumerate(answers)
    ]
    assert rewards(ALLOCATORS["majority"](group(*played))) == [[value] * 2 for value in expected]


def test_a_failed_trajectory_has_no_vote():
    played = [trajectory(turn(0), answer="7"), trajectory(turn(0), sample=1, answer="8")]
    lost = [replace(failed(turn(0), sample=2 + i), answer="8") for i in range(2)]
    assert rewards(ALLOCATORS["majority"](group(*played, *lost))) == [[1.0], [0.0], [None], [None]]


TREE = tree(("0", "a", {"local": 1.0, "team": 1.0, "f1": 1.0}))
BAD = [
    (
        "shared_outcome",
        {},
        line("a", outcome=None),
        "trajectory 0/t/0: completed with outcome None",
    ),
    (
        "shared_outcome",
        {},
        line("a", outcome=float("nan")),
        "trajectory 0/t/0: completed with outcome nan",
    ),
    (
        "shared_outcome",
        {},
        line("a", task_id="u"),
        "trajectory 0/t/0: its task is 'u', but its group's task is 't'",
    ),
    (
        "shares",
        {"split": "turns", "weights": {"a": 0}},
        line("a"),
        "trajectory 0/t/0: no agent has a share",
    ),
    ("majority", {}, line("a"), "trajectory 0/t/0: its environment reports no answer"),
    (
        "turn_difference",
        {"metric": "f1", "scored": ["b"]},
        line("a", "b"),
        "turn 1 (b): no score 'f1'; measured: nothing",
    ),
    (
        "turn_difference",
        {"metric": "f1", "scored": ["b"]},
        line(*f1(("a", 0.5), ("b", 1.0))),
        "turn 0 (a): 'f1' is 0.5, but turn 1 (b) ends its round with 1.0",
    ),
    (
        "turn_difference",
        {"metric": "f1", "scored": ["b"], "absolute": ["a"]},
        line(("b", {"f1": 1.0}), "a"),
        "turn 1 (a): 'f1' is measured neither on this turn nor later",
    ),
    (
        "shaping",
        {},
        line(("a", {"team": 1.0})),
        "trajectory 0/t/0, turn 0 (a): no score 'local'; measured: team",
    ),
    (
        "local_team",
        {},
        line("a", ("b", {"team": 1.0})),
        "trajectory 0/t/0, turn 0 (a): no score 'local'",
    ),
    ("local_team", {}, line(("a", {"local": 1.0})), "turn 0 (a): no score 'team'; measured: local"),
    (
        "local_team",
        {},
        line(("a", {"local": float("nan"), "team": 0.0})),
        "turn 0 (a): score 'local' is nan",
    ),
    (
        "local_team",
        {"alpha": float("inf")},
        line(("a", {"local": 1, "team": 1})),
        "turn 0 (a): reward is inf",
    ),
    (
        "local_team",
        {},
        tree(("0.1", "a", {"local": 1.0, "team": 1.0})),
        "node 0.1 (a): no score 'branch'",
    ),
    (
        "local_team",
        {},
        tree(("0.1", "a", {})),
        "trajectory 0/t/0, turn 1, node 0.1 (a): no score 'local'",
    ),
    ("tree_shaping", {}, line(("a", {"local": 1.0})), "trajectory 0/t/0: not a tree"),
    ("coach", {"outcome_weight": 1.0}, TREE, "trajectory 0/t/0: sampled as a tree"),
]
OPTIONS_OF_ALLOCATORS_WITHOUT_TREES = {
    "shared_outcome": {},
    "shares": {},
    "discounts": {"mode": "binary"},
    "majority": {},
    "turn_difference": {"metric": "f1", "scored": ["a"]},
    "shaping": {},
}
TREE_ERROR = "trajectory 0/t/0: sampled as a tree, whose turns off the path have no outcome"
for allocator_name, allocator_options in OPTIONS_OF_ALLOCATORS_WITHOUT_TREES.items():
    BAD.append((allocator_name, allocator_options, TREE, TREE_ERROR))


@pytest.mark.parametrize(("name", "options", "played", "message"), BAD)
def test_trajectories_that_cannot_be_rewarded_are_refused_in_one_line(
    name, options, played, message
):
    with pytest.raises(RewardError) as caught:
        ALLOCATORS[name](group(played), **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
