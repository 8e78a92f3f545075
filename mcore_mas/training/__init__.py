"""Training algorithm: the step, the loop, policy trainers, asynchronous rollouts, weight sync, metrics."""
