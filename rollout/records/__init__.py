"""Records that every part exchanges: tasks, completions, turns, trajectories and groups."""
