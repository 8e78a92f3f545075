"""Gateway: agent programs of others speak OpenAI's or Anthropic's HTTP dialect to a trajectory's policies.

dialects   what is asked and answered, whatever the dialect
completions, responses, messages   OpenAI Chat Completions, OpenAI Responses, Anthropic Messages
sessions   a trajectory's calls: which chat a call goes on with, retries, what nobody read
app        the HTTP application: routes, keys, limits, errors as statuses
"""
