"""HTTP gateway through which agent programs call a trajectory's agents in OpenAI's or Anthropic's API."""
