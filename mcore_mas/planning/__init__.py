"""Planning: what a run will take of a cluster, and the placement that makes the most of it."""
