"""Teams of agents: roles, sessions, episodes, trees of turns, and the collection of trajectories."""
