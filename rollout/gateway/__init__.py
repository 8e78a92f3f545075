"""HTTP gateway, at which agent programs call agents through OpenAI's or Anthropic's API."""
