"""What people read of a run: pages and drawings of trajectories, tables, curves and studies."""
