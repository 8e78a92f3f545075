"""Text made safe to show: valid, of bounded length, and without terminal commands."""

import logging
import re

# Control characters except tab and newline: ESC and the C1 range begin terminal commands, CR
# overwrites a line. Unicode's bidirectional and invisible format characters, which reorder or hide
# neighbouring text. Lone surrogates, which no terminal or page can hold.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


def valid_text(text: str) -> str:
    """Replace lone surrogates by U+FFFD; no tokenizer, file or message can hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def truncate_middle(text: str, max_chars: int) -> str:
    """Return the text; if it is longer than `max_chars`, replace its middle by a note.

    Results say most at their beginning, and errors at their end.

    Args:
        max_chars: number of characters to retain, half of them at each end.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    omitted = len(text) - 2 * half
    return f"{text[:half]}\n[... {omitted} characters ...]\n{text[len(text) - half :]}"


def escape_text(text: str) -> str:
    """Write control, bidirectional and invisible characters as escapes such as `\\x1b`."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_line(text: str) -> str:
    """Return `escape_text` on one line."""
    return escape_text(text).replace("\n", "\\n")


class EscapingFormatter(logging.Formatter):
    """Formatter of log records that may quote what a model wrote, as a traceback does."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_text(super().format(record))


def escape_logs() -> None:
    """Escape log records that no handler is configured for, such as asyncio's tracebacks."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapingFormatter())
