"""Unchanged programs of agent frameworks, played and trained through the gateway: `make test-frameworks`."""
