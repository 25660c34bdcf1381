"""Errors that a client sees, in the format of OpenAI's API or of Anthropic's."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec

from p2p_engine.errors import P2pError
from proxy.http.asgi import Answer

RETRY_AFTER_SECONDS = 3
# Anthropic's names for what it has a name of its own for.
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def says_enough(error: object) -> bool:
    """Tell whether an exception's message says what is wrong, without a traceback."""
    return isinstance(error, P2pError)


class ProxyError(P2pError):
    """A request failed. `code` is stable, for programs; the message is for people.

    `retry_after` is the number of seconds after which the same request may succeed, if that is
    known.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float = RETRY_AFTER_SECONDS,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.details = details

    def answer_to_client(self, *, is_anthropic: bool = False) -> Answer:
        """Build the HTTP answer; 429 and 503 carry `Retry-After`."""
        headers = [(b"content-type", b"application/json")]
        if self.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        body = self.body(is_anthropic=is_anthropic)
        return Answer(self.status, headers, msgspec.json.encode(body))

    def body(self, *, is_anthropic: bool = False) -> dict[str, Any]:
        """Return the answer's JSON object."""
        if is_anthropic:
            other = "invalid_request_error" if self.status < 500 else "api_error"
            said = {"type": _ANTHROPIC_TYPES.get(self.status, other), "message": str(self)}
            return {"type": "error", "error": {**said, "code": self.code, **self.details}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": {**error, **self.details}}


class LegFailed(ProxyError):
    """An instance could not be reached, timed out, or sent an answer that cannot be used.

    `can_retry`: another instance may succeed, and the client has received nothing yet. `answered`:
    the status of the instance's answer, if it is that which failed the leg; else 0. An answer that
    is too long counts as one of 500.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        can_retry: bool = False,
        answered: int = 0,
        answer: Answer | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.can_retry = can_retry
        self.answered = answered
        self.answer = answer

    def answer_to_client(self, *, is_anthropic: bool = False) -> Answer:
        """Return the instance's own answer if there is one to pass on, else one of ours."""
        return self.answer or super().answer_to_client(is_anthropic=is_anthropic)


class Refused(ProxyError):
    """An instance refused the request; the client gets its answer unchanged."""

    def __init__(self, role: str, answer: Answer) -> None:
        status = answer.status
        super().__init__(status, f"{role}_refused", f"the {role} instance answered {status}")
        self.answer = answer

    def answer_to_client(self, *, is_anthropic: bool = False) -> Answer:
        """Return the instance's answer."""
        return self.answer
