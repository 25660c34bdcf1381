"""Builds the bodies of both legs from the client's; moves values without parsing them; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from proxy.errors import ProxyError

if TYPE_CHECKING:
    from p2p_engine.wire.request_ids import ProxyId

Fields: TypeAlias = dict[str, msgspec.Raw]
Params: TypeAlias = dict[str, Any]

KV_PARAMS = "kv_transfer_params"
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_TRUE = b"true"
# Fields without meaning for a single token.
_NOT_FOR_PREFILL = ("min_tokens", "stream_options")
# Where vLLM takes transfers and names of requests from. Only the proxy says these; a client's could
# name any host and any other request. vLLM also takes the first two from within `vllm_xargs`.
_TRANSFERS = {KV_PARAMS, "ec_transfer_params"}
_NOT_FOR_CLIENTS = {*_TRANSFERS, "request_id"}
_XARGS = "vllm_xargs"
# A request has few fields that may be large. All others together, and the names, are small: a body
# of millions of fields would stop the proxy for seconds.
_MAY_BE_LARGE = (
    "chat_template", "chat_template_kwargs", "documents", "input", "logit_bias", "messages",
    "mm_processor_kwargs", "prompt", "prompt_embeds", "response_format", "structured_outputs",
    "tokens", "tools",
)  # fmt: skip
MAX_SMALL_BYTES = 256 << 10
FEW_COLONS = 4096  # a body with fewer has fewer fields, and needs no closer look
MAX_DIGITS = 9  # of a number of choices; vLLM takes 16,384 of them by default

_fields_decoder = msgspec.json.Decoder(Fields)
_large_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, msgspec.Raw, msgspec.Raw()) for name in _MAY_BE_LARGE])
)


@dataclass(frozen=True, eq=False)
class ClientRequest:
    """A client's request: its body, and its top-level fields as raw JSON, without those that only
    the proxy may set."""

    body: bytes
    fields: Fields

    @property
    def is_stream(self) -> bool:
        """Tell whether the client wants server-sent events."""
        return bytes(self.fields.get("stream", b"")) == _TRUE


NOTHING = ClientRequest(b"", {})


@dataclass(frozen=True)
class Prefilled:
    """A prefill instance's answer: its parameters for decode, and its token counts."""

    params: Fields
    cached_tokens: int | None
    prompt_tokens: int = 0


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _PrefillAnswer(msgspec.Struct):
    choices: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    kv_transfer_params: Fields | None = None
    usage: _Usage | None = None


_model_decoder: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(str | None)
_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)
BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def parse(body: bytes) -> ClientRequest:
    """Split a request into its top-level fields, as raw JSON.

    The body stays as it is, unless it has something that only the proxy may say.

    Raises:
        ProxyError: 400, the body is not a JSON object, or what should be small in it is not.
    """
    try:
        if len(body) > MAX_SMALL_BYTES and _has_many_colons(body):
            _check_small(body)
        fields = _fields_decoder.decode(body)
    except BAD_JSON as error:
        raise ProxyError(400, "invalid_json", f"the body is not a JSON object: {error}") from error
    if _XARGS in fields or not fields.keys().isdisjoint(_NOT_FOR_CLIENTS):
        fields = {k: v for k, v in fields.items() if k not in _NOT_FOR_CLIENTS}
        if _XARGS in fields:
            fields[_XARGS] = _without_transfers(fields[_XARGS])
        body = msgspec.json.encode(fields)
    return ClientRequest(body, fields)


def _has_many_colons(body: bytes) -> bool:
    num_colons = 0
    for start in range(0, len(body), MAX_SMALL_BYTES):
        num_colons += body.count(b":", start, start + MAX_SMALL_BYTES)
        if num_colons > FEW_COLONS:
            return True
    return False


def _check_small(body: bytes) -> None:
    """Refuse a body that has much outside of the fields that may be large; skips all others."""
    large = _large_decoder.decode(body)
    num_bytes = len(body) - sum(len(bytes_of(getattr(large, name))) for name in _MAY_BE_LARGE)
    if num_bytes > MAX_SMALL_BYTES:
        message = f"the fields beside {', '.join(_MAY_BE_LARGE)} have {num_bytes} bytes"
        raise ProxyError(400, "too_many_fields", f"{message}; at most {MAX_SMALL_BYTES} are taken")


def bytes_of(value: msgspec.Raw) -> memoryview:
    """Return the JSON of a value, without a copy."""
    return memoryview(value)


def _without_transfers(arguments: msgspec.Raw) -> msgspec.Raw:
    """Return a client's `vllm_xargs`; what is no object is left to vLLM, which refuses it."""
    try:
        fields = _fields_decoder.decode(arguments)
    except BAD_JSON:
        return arguments
    kept = {k: v for k, v in fields.items() if k not in _TRANSFERS}
    return msgspec.Raw(msgspec.json.encode(kept))


def model_of(fields: Fields) -> str | None:
    """Return the requested model; None if it is not a string."""
    try:
        return _model_decoder.decode(fields.get("model", b"null"))
    except BAD_JSON:
        return None


def num_choices(fields: Fields) -> int:
    """Return the number of continuations of each prompt."""
    given = bytes(fields.get("n", b"1"))
    return int(given) if given.isdigit() and len(given) <= MAX_DIGITS else 1


def prefill_body(fields: Fields, params: Params | None) -> bytes:
    """Return the prefill body: one token, no stream. `n` stays: each choice is a separate
    transfer."""
    kept: dict[str, Any] = {k: v for k, v in fields.items() if k not in _NOT_FOR_PREFILL}
    kept |= {"max_tokens": _ONE, "stream": _FALSE}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    if params is not None:
        kept[KV_PARAMS] = params
    return msgspec.json.encode(kept)


def decode_body(asked: ClientRequest, params: Params | None) -> bytes:
    """Return the client's body with our parameters spliced in before the last brace."""
    if params is None:
        return asked.body
    head = memoryview(asked.body.rstrip(b" \t\r\n"))[:-1]  # the body may be large: one copy
    comma = b"," if asked.fields else b""
    ours = b'%b"%b":%b}' % (comma, KV_PARAMS.encode(), msgspec.json.encode(params))
    return b"".join((head, ours))


def request_id(proxy_id: ProxyId) -> str:
    """Return the request id of both legs: the old form with both addresses, if both are known."""
    is_whole = proxy_id.prefill and proxy_id.decode
    return str(proxy_id) if is_whole else proxy_id.transfer_id


def prefill_params(proxy_id: ProxyId) -> Params:
    """Return the parameters that name the decode instance as the destination of the KV.

    If its KV address is unknown, they are None: prefill holds the KV and answers with its own
    address.
    """
    host, port = _split(proxy_id.decode)
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": proxy_id.transfer_id,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": None,
        "remote_block_ids": None,
        "remote_engine_id": None,
    }


def decode_params(proxy_id: ProxyId, answered: Fields) -> Params:
    """Return the parameters that name the source of the KV; those of prefill's answer take
    precedence."""
    host, port = _split(proxy_id.prefill)
    ours = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": proxy_id.transfer_id,
        "remote_host": host,
        "remote_port": port,
    }
    return {**ours, **answered}


def read_prefill(answer: bytes) -> Prefilled:
    """Read a prefill instance's answer; its parameters may be missing.

    Raises:
        ValueError: it is not a completion.
    """
    try:
        said = _answer_decoder.decode(answer)
    except BAD_JSON as error:
        raise ValueError(f"{len(answer)} bytes that are no completion: {error}") from error
    details = said.usage.prompt_tokens_details if said.usage else None
    return Prefilled(
        said.kv_transfer_params or {},
        details.cached_tokens if details else None,
        said.usage.prompt_tokens if said.usage else 0,
    )


def _split(address: str) -> tuple[str, int] | tuple[None, None]:
    if not address:
        return None, None
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
