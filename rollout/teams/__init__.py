"""Teams of agents: roles, chats, sessions, episodes, trees, and the collection of trajectories."""
