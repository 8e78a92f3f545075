"""Errors of calls to frozen models."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout.base.errors import Unusable
from rollout.base.http import error_for_status

# Statuses that every prompt would get: wrong key, no quota, no permission, and wrong model or URL.
_UNUSABLE_STATUSES = (401, 402, 403, 404)


class RemoteError(Unusable):
    """A frozen model cannot be used at all; the message is one line and says what to do."""


def status_error(status: int, body: str, headers: Mapping[str, str]) -> Exception:
    """Return the error for an HTTP status other than 200, whose meaning all vendors share.

    Returns:
        RemoteError if no prompt will be answered, Refused if this one will not, else Unanswered.
    """
    error = error_for_status(status, body, headers)
    is_redirect = 300 <= status < 400
    has_no_quota = status == 429 and _is_out_of_quota(body)
    if status in _UNUSABLE_STATUSES or is_redirect or has_no_quota:
        return RemoteError(str(error))
    return error


def _is_out_of_quota(body: str) -> bool:
    """Return True if OpenAI's body names the quota; status 429 also stands for too many requests."""
    try:
        return bool(json.loads(body)["error"]["code"] == "insufficient_quota")
    except (ValueError, KeyError, TypeError):
        return False
