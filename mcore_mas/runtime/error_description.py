"""The line that describes an error: the last line of a job's log and of a command."""

import errno

from mcore_mas import PACKAGES
from rollout.base.text import escape_line


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, which begins with its type unless this project defines the type.

    An error that Ray passes on from another process is described as it was raised there.
    """
    while type(error).__module__ == "ray.exceptions":
        original = getattr(error, "cause", None)
        if not isinstance(original, Exception):
            break
        error = original

    message = escape_line(" ".join(str(error).split()))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message += "; make room, and run it again"
    is_ours = type(error).__module__.partition(".")[0] in PACKAGES
    if is_ours and message:
        return message
    return f"{type(error).__name__}: {message}".rstrip(": ")
