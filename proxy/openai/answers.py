"""What an instance's answer to a leg means: good, the client's fault, or the instance's."""

from __future__ import annotations

import re
from http import HTTPStatus

import msgspec

from proxy.errors import LegFailed, ProxyError, Refused
from proxy.fleet.instances import Role
from proxy.http.asgi import Answer, Headers
from proxy.http.client import ClientError, Response
from proxy.openai import payload

EVENT_STREAM = b"text/event-stream"
# An instance's own gateway errors keep their status, and another instance may do better; its other
# 5xx are a bad gateway to the client, and may be due to the request: it is not tried elsewhere.
_GATEWAY_ERRORS = (502, 503, 504)
# How vLLM says, with a 500, that the client's prompt is too long.
_TOO_LONG = (b"maximum context length", b"maximum model length", b"max_model_len")

# Not from an instance to the client: what belongs to the one connection or to the instance.
KEPT_BACK_HEADERS = {
    b"connection", b"date", b"keep-alive", b"proxy-connection", b"server", b"set-cookie", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"x-request-id",
}  # fmt: skip


# How vLLM answers, with a 200, what it no longer computes because it was told to stop. Inside a
# text, the quotes would be escaped.
_ABORTED = re.compile(rb'"finish_reason": ?"abort"')
# Such an answer is shorter, and of any other this much comes at once.
_MAX_ABORTED_BYTES = 4096


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _Error | None = None
    message: str = ""


def check_prefill(response: Response, answer: bytes) -> payload.Prefilled:
    """Return what is to be known of a prefill instance's answer.

    Raises:
        LegFailed: the prefill did not succeed.
        ProxyError: it was refused; 4xx are passed on as they are.
    """
    status = response.status
    if 400 <= status < 500:
        raise Refused(
            Role.PREFILL.label, Answer(status, passed_headers(response, b"content-length"), answer)
        )
    if status != HTTPStatus.OK:
        _raise_if_too_long(status, answer)
        can_retry = status in _GATEWAY_ERRORS
        passed = status if can_retry else HTTPStatus.BAD_GATEWAY
        message = f"the prefill instance answered {status}"
        raise LegFailed(passed, "prefill_failed", message, can_retry=can_retry)
    if _ABORTED.search(answer):
        raise _aborted(Role.PREFILL.label)
    try:
        return payload.read_prefill(answer)
    except ValueError as error:
        message = f"the prefill instance answered {error}"
        raise LegFailed(HTTPStatus.BAD_GATEWAY, "prefill_bad_answer", message) from error


async def check_answer(response: Response, role: str, max_bytes: int) -> None:
    """Pass all answers but 5xx, which the client gets as they are if nobody else can help.

    Waits until an answer that is no failure has begun.

    Raises:
        ClientError: it does not begin.
        LegFailed: the instance failed.
        ProxyError: it was the client's fault.
    """
    status = response.status
    if status == HTTPStatus.OK:
        is_stream = response.content_type == EVENT_STREAM
        if _ABORTED.search(await response.ahead(1 if is_stream else _MAX_ABORTED_BYTES)):
            raise _aborted(role)
    if status < 500:
        return
    try:
        answer = await read(response, max_bytes)
    except ClientError:
        answer = b""
    _raise_if_too_long(status, answer)
    raise LegFailed(
        status,
        f"{role}_failed",
        f"the {role} instance answered {status}",
        can_retry=status in _GATEWAY_ERRORS,
        answer=_as_answer(response, answer),
    )


def _aborted(role: str) -> LegFailed:
    message = f"the {role} instance is stopping"
    return LegFailed(HTTPStatus.SERVICE_UNAVAILABLE, f"{role}_stopping", message, can_retry=True)


async def read(response: Response, max_bytes: int) -> bytes:
    """Return an answer's body; nothing if it is longer than any that we can use."""
    body = bytearray()
    while piece := await response.piece():
        body += piece
        if len(body) > max_bytes:
            return b""
    return bytes(body)


def _as_answer(response: Response, body: bytes) -> Answer:
    return Answer(response.status, passed_headers(response, b"content-length"), body)


def passed_headers(response: Response, *dropped: bytes) -> Headers:
    """Return what the client may see of an instance's headers; without those `dropped`."""
    return [
        (name, value)
        for name, value in response.headers
        if (key := name.lower()) not in KEPT_BACK_HEADERS and key not in dropped and value.isascii()
    ]


def _raise_if_too_long(status: int, answer: bytes) -> None:
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and any(words in answer for words in _TOO_LONG):
        raise ProxyError(400, "context_length_exceeded", _message(answer))


def _message(answer: bytes) -> str:
    try:
        said = msgspec.json.decode(answer, type=_ErrorAnswer)
    except payload.BAD_JSON:
        return "the prompt is too long for the model"
    return (said.error.message if said.error else said.message) or "the prompt is too long"
