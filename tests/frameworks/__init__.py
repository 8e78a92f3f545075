"""Agent programs of published frameworks, unchanged, played and trained through the gateway: `make test-frameworks`."""
