"""Records that all packages exchange: tasks, completions, turns, trajectories and groups."""
