"""Rollouts: teams of agents play tasks and every turn is recorded. Engines import their libraries on first use."""
