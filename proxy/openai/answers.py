"""Classifies an instance's answer to a leg: success, the client's fault, or the instance's
fault."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from proxy.errors import LegFailed, ProxyError, Refused
from proxy.fleet.instances import GATEWAY_ERRORS, Role
from proxy.http.asgi import Answer, Headers
from proxy.http.client import HIGH_WATER_BYTES, ClientError, Response
from proxy.openai import payload
from proxy.openai.apis import Api
from proxy.openai.fields import BAD_JSON

_ERROR = HTTPStatus.INTERNAL_SERVER_ERROR
EVENT_STREAM = b"text/event-stream"
# Texts in vLLM's 500 answers to a prompt that is too long: the client's fault.
_TOO_LONG = (b"maximum context length", b"maximum model length", b"max_model_len")

# All that vLLM says of a request that has failed; with `kv_load_failure_policy` `fail`, so does one
# whose KV did not arrive.
_BARE = "Internal server error"
_LIKELY_CAUSE = "its KV may not have arrived; the instance's log then has 'load failed' and why"

# Headers of an instance that the client does not get: they belong to the connection or the
# instance, or are orders to a server in front or to a browser about the whole site.
KEPT_BACK_HEADERS = {
    b"alt-svc", b"clear-site-data", b"connection", b"content-security-policy", b"date",
    b"keep-alive", b"proxy-connection", b"server", b"set-cookie", b"strict-transport-security",
    b"te", b"trailer", b"transfer-encoding", b"upgrade", b"x-accel-redirect",
    b"x-content-type-options", b"x-request-id", b"x-sendfile",
}  # fmt: skip
# A browser must not take an answer for anything but what it says, and may run nothing in it: text
# that a model wrote would otherwise be a page of ours.
_NOT_FOR_BROWSERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"sandbox; default-src 'none'"),
]

# vLLM answers 200 if it aborts a request at shutdown. Such an answer is shorter than this. Other
# answers deliver this much at once.
_MAX_ABORTED_BYTES = 4096


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _Error | None = None
    message: str = ""


def check_prefill(response: Response, answer: bytes | None, api: Api) -> payload.Prefilled:
    """Return the relevant part of a prefill instance's answer; `answer` is None if it is too long.

    Raises:
        LegFailed: the prefill did not succeed.
        ProxyError: the instance refused the request; 4xx answers go to the client unchanged.
    """
    status = response.status
    if 400 <= status < 500:
        raise Refused(Role.PREFILL.label, _as_answer(response, answer or b""))
    if status != HTTPStatus.OK:
        _raise_if_too_long(status, answer or b"")
        # Gateway errors keep their status. A 500 may be due to the request, or to an instance that
        # answers so to all. Other 5xx are due to the request, and are not retried.
        can_retry = status in GATEWAY_ERRORS or status == _ERROR
        passed = status if status in GATEWAY_ERRORS else HTTPStatus.BAD_GATEWAY
        message = f"the prefill instance answered {status}"
        raise LegFailed(passed, "prefill_failed", message, can_retry=can_retry, answered=status)
    if answer is None:  # of many choices or prompts: as with a 500, the request may be at fault
        message = "the answer of the prefill instance is too long"
        raise LegFailed(
            HTTPStatus.BAD_GATEWAY, "prefill_bad_answer", message, can_retry=True, answered=_ERROR
        )
    if api.aborted.search(answer):
        raise _aborted(Role.PREFILL.label)
    try:
        return payload.read_prefill(answer, api)
    except ValueError as error:
        message = f"the prefill instance answered {error}"
        raise LegFailed(HTTPStatus.BAD_GATEWAY, "prefill_bad_answer", message) from error


async def check_answer(response: Response, role: str, max_bytes: int, api: Api) -> None:
    """Accept all answers but 5xx; waits until an answer without an error has begun.

    A 5xx goes to the client unchanged if no other instance can answer, but for one of vLLM's that
    says nothing.

    Raises:
        ClientError: the answer did not begin.
        LegFailed: the instance failed or is stopping.
        ProxyError: the request was at fault.
    """
    status = response.status
    if status == HTTPStatus.OK:
        is_stream = response.content_type == EVENT_STREAM
        begun = await (_events(response, api) if is_stream else response.ahead(_MAX_ABORTED_BYTES))
        if api.aborted.search(begun) and not (is_stream and api.has_events):
            raise _aborted(role)
        if is_stream and api.unavailable.search(begun):
            status = HTTPStatus.SERVICE_UNAVAILABLE
    if status < 500:
        return
    try:
        answer = await read(response, max_bytes) or b""
    except ClientError:
        answer = b""
    _raise_if_too_long(status, answer)
    message = f"the {role} instance answered {status}"
    is_bare = status == _ERROR and _message(answer) == _BARE
    raise LegFailed(
        status,
        f"{role}_failed",
        f"{message}: {_LIKELY_CAUSE}" if is_bare else message,
        can_retry=status in GATEWAY_ERRORS,
        answered=status,
        answer=None if is_bare else _as_answer(response, answer),
    )


async def _events(response: Response, api: Api) -> bytes:
    """Return a stream's start, up to the first event that tells whether the engine has begun; of a
    longer one, as much as the connection reads ahead."""
    begun = await response.ahead(1)
    while not (response.is_complete or api.tells.search(begun) or len(begun) > HIGH_WATER_BYTES):
        begun = await response.ahead(len(begun) + 1)
    return begun


def _aborted(role: str) -> LegFailed:
    message = f"the {role} instance is stopping"
    return LegFailed(HTTPStatus.SERVICE_UNAVAILABLE, f"{role}_stopping", message, can_retry=True)


async def read(response: Response, max_bytes: int) -> bytes | None:
    """Return an answer's body; None if it is longer than `max_bytes`.

    Raises:
        ClientError: the answer broke off.
    """
    body = bytearray()
    while piece := await response.piece():
        body += piece
        if len(body) > max_bytes:
            return None
    return bytes(body)


def _as_answer(response: Response, body: bytes) -> Answer:
    return Answer(response.status, passed_headers(response, b"content-length"), body)


def passed_headers(response: Response, *dropped: bytes) -> Headers:
    """Return the headers for the client, without those of `dropped`; names are in lower case."""
    hops = {token.strip().lower() for token in response.header(b"connection").split(b",")}
    kept_back = hops.union(dropped)
    passed = [
        (name, value)
        for name, value in response.headers
        if name not in KEPT_BACK_HEADERS and name not in kept_back and value.isascii()
    ]
    return passed + _NOT_FOR_BROWSERS


def _raise_if_too_long(status: int, answer: bytes) -> None:
    if status == _ERROR and any(words in answer for words in _TOO_LONG):
        raise ProxyError(400, "context_length_exceeded", _message(answer))


def _message(answer: bytes) -> str:
    try:
        said = msgspec.json.decode(answer, type=_ErrorAnswer)
    except BAD_JSON:
        return "the prompt is too long for the model"
    return (said.error.message if said.error else said.message) or "the prompt is too long"
