"""Gateway: agent programs of others speak OpenAI's or Anthropic's HTTP dialect to a trajectory's policies."""
