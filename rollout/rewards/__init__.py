"""Reward allocators: assign a reward to every turn of a group of trajectories.

shared_outcome    every turn of every agent gets the outcome (Dr.MAS)
shares            agents get shares of the outcome, in full or divided (UnityMAS-O, graphs)
discounts         the outcome is weighted or discounted by position (PettingLLMs)
majority          1 for the most frequent answer of the group (test-time RL; MARTI)
turn_difference   the change of a measure of the answer in each round (UnityMAS-O)
shaping           the score of a turn relative to earlier scores (MARTI)
local_team        the score of the turn plus the team's reward (Stronger-MAS); also for trees
tree_shaping      the score of a turn relative to its branch's parent and siblings (MARTI's MARS2); only for trees
coach             a coach's score of the turn (MAPPA); also for trees

`judge_undecided` runs before the allocator: it counts undecidable answers as wrong if an agent
gives many of them. `penalties` run after it. The options of an allocator are checked when the
config is read. An allocator gives every turn of a completed trajectory a finite reward or masks it,
and changes neither failed trajectories nor its input. It raises RewardError if a trajectory lacks
the outcome or score that it needs, or is a tree and the allocator does not support trees.
"""

from collections.abc import Callable

from rollout.records.trajectory import Group
from rollout.rewards.allocation import discounts, majority, shared_outcome, shares
from rollout.rewards.turn_scores import coach, local_team, shaping, tree_shaping, turn_difference

# (group, **options) -> the group with rewards on its turns
ALLOCATORS: dict[str, Callable[..., Group]] = {
    allocator.__name__: allocator
    for allocator in (
        shared_outcome,
        shares,
        discounts,
        majority,
        turn_difference,
        shaping,
        local_team,
        tree_shaping,
        coach,
    )
}
