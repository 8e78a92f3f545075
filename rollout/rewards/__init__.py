"""Reward assignment (allocators): from the trajectories of a group to a reward for every turn.

shared_outcome    every turn of every agent gets the outcome (Dr.MAS)
shares            agents' shares of the outcome, in full or divided (UnityMAS-O, graphs)
discounts         the outcome weighted or discounted by place, thresholded or clipped (PettingLLMs)
majority          1 for the group's most frequent answer, without any truth (test-time RL; MARTI)
turn_difference   what each round added to a measure of the answer (UnityMAS-O, search and code)
shaping           a turn's score against what was said before (MARTI)
local_team        a turn's own score and the team's reward for it (Stronger-MAS); trees too
tree_shaping      a branch's score against its parent's and siblings' (MARTI's MARS2); trees only
coach             a coach's score of the turn (MAPPA); trees too

Before them `judge_undecided` counts answers that nobody can judge as wrong where an agent gives many; `penalties` come
after. An allocator checks its options before it looks at a trajectory, gives every turn of a completed trajectory a
finite reward or masks it, and leaves failed trajectories and its input as they are. It raises RewardError where a
trajectory lacks what it needs, an outcome or a score, or is a tree and the allocator not one for trees.
"""

from collections.abc import Callable

from rollout.records.trajectory import Group
from rollout.rewards.allocation import discounts, majority, shared_outcome, shares
from rollout.rewards.turn_scores import coach, local_team, shaping, tree_shaping, turn_difference

ALLOCATORS: dict[
    str, Callable[..., Group]
] = {  # (group, **options) -> the group with rewards on its turns
    allocator.__name__: allocator
    for allocator in (
        *(shared_outcome, shares, discounts, majority),
        *(turn_difference, shaping, local_team, tree_shaping, coach),
    )
}
