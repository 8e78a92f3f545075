"""Sums of reasoning-gym, as the class `ReasoningGymEnv` of the package `verifiers` 0.1 asks for them."""

import verifiers as vf


def load_environment() -> vf.Environment:
    """Return the environment."""
    return vf.ReasoningGymEnv(gym="basic_arithmetic", num_train_examples=20, num_eval_examples=5)
