"""Errors of calls, as HTTP responses of the vendors' APIs."""

from typing import Any

_ERROR_KINDS: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class GatewayError(Exception):
    """A call that cannot be answered.

    Attributes:
        status: HTTP status of the response.
        kind: type of the error in the vendors' APIs, such as "not_found_error".
        code: code of the error in OpenAI's APIs, "" if there is none.
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = _ERROR_KINDS.get(status, "api_error")
        self.code = code


def openai_error(error: GatewayError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's APIs."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": None,
            "code": error.code or None,
        }
    }
