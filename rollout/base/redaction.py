"""Removal of secrets from text."""

import re

# The user of a URL; the value of a name that sounds like a secret, unless it is a file; and keys by
# the prefixes of their providers.
_SECRETS = re.compile(
    r"(?P<scheme>://)[^\s/?#'\"]+(?=@)"
    r"|(?<![\w./-])(?P<named>[\w.-]*(?i:pass(word|wd|phrase)|secret|(?<!max_)token|api_?key|access_?key)['\"]?(=|:\s?))"
    r"(?!\[redacted\])('[^']*'|\"[^\"]*\"|['\"]?[^\s'\",;&}\])]*[^\s'\",;&}\]):])"
    r"|\b(?P<prefix>sk-|hf_|gh[a-z]_|github_pat_|xox[a-z]-)[\w-]{8,}"
)


def redact_secrets(text: str) -> str:
    """Replace passwords, tokens and keys by [redacted], as far as their context shows them."""
    return _SECRETS.sub(
        lambda match: f"{match['scheme'] or match['named'] or match['prefix']}[redacted]", text
    )
