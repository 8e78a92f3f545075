"""What every other folder builds on, and which imports nothing of ours: the registry look-up and typed options."""
