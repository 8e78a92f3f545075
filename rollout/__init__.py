"""Rollouts: teams of agents play tasks, and every turn is recorded; engines import their libraries on first use."""

if __name__ == "rollout":  # from the checkout's folder; a second copy of each module would meet the first
    raise ModuleNotFoundError("No module named 'rollout'", name="rollout")
