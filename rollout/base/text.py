"""Text that others wrote, made harmless where a person sees it; and the known names that are like a wrong one."""

import logging
import re
from collections.abc import Iterable
from difflib import get_close_matches

# control characters but tab and newline (ESC and the C1 range begin a terminal's commands, CR overwrites a line), and
# the marks that reorder or hide what stands beside them (Unicode's bidirectional and invisible format characters), and
# lone surrogates, which no terminal or page can hold
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


def valid_text(text: str) -> str:
    """Return the text with U+FFFD for every lone surrogate, which no tokenizer, file or message can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def shown_text(text: str) -> str:
    """The text with control, bidirectional and invisible characters written out as `\\x1b` or `\\u202e`."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown_line(text: str) -> str:
    """`shown_text` on one line."""
    return shown_text(text).replace("\n", "\\n")


class ShownFormatter(logging.Formatter):
    """Records as `shown_text`: a traceback may quote what a model wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return shown_text(super().format(record))


def show_logs() -> None:
    """Make harmless what is logged where nobody has said how, as asyncio's tracebacks are."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(ShownFormatter())


# who a URL signs in as; the value of what is called like a key, but no file; keys by the beginnings of providers
_SECRETS = re.compile(
    r"(?P<kept>://)[^\s/?#'\"]+(?=@)"
    r"|(?<![\w./-])(?P<named>[\w.-]*(?i:pass(word|wd|phrase)|secret|(?<!max_)token|api_?key|access_?key)['\"]?(=|:\s?))"
    r"(?!\[redacted\])('[^']*'|\"[^\"]*\"|['\"]?[^\s'\",;&}\])]*[^\s'\",;&}\]):])"
    r"|\b(?P<prefix>sk-|hf_|gh[a-z]_|github_pat_|xox[a-z]-)[\w-]{8,}"
)


def without_secrets(text: str) -> str:
    """The text with [redacted] in place of passwords, tokens and keys, as far as they can be told from their place."""
    return _SECRETS.sub(
        lambda found: f"{found['kept'] or found['named'] or found['prefix']}[redacted]", text
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error that has listed what is known: "; nearest: a, b", or "" where nothing is like the name."""
    near = get_close_matches(name, list(known), n=3, cutoff=0.66)  # "atc" is like "act"
    return f"; nearest: {', '.join(near)}" if near else ""
