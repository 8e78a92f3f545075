"""Published environments of verifiers and OpenEnv, played and trained unchanged: `make test-environments`."""
