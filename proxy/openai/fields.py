"""Fields: the top level of a request's JSON, without what only the proxy may say; pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from proxy.http.memory import BodyRefused

Fields: TypeAlias = dict[str, msgspec.Raw]

KV_PARAMS = "kv_transfer_params"
# Where vLLM takes transfers and names of requests from. Only the proxy says these; a client's could
# name any host and any other request. vLLM also takes the first two from within `vllm_xargs`.
_TRANSFERS = {KV_PARAMS, "ec_transfer_params"}
_NOT_FOR_CLIENTS = {*_TRANSFERS, "request_id"}
_XARGS = "vllm_xargs"
# With the last one, vLLM would announce blocks again that it has announced: they would count twice
# among those that an instance holds.
_NOT_IN_XARGS = {*_TRANSFERS, "kv_cache_report_mode"}
# A request has few fields that may be large. All others together, and the names, are small: a body
# of millions of fields would take seconds.
MAY_BE_LARGE = (
    "chat_template", "chat_template_kwargs", "documents", "input", "instructions", "logit_bias",
    "messages", "mm_processor_kwargs", "output_config", "previous_input_messages", "prompt",
    "prompt_embeds", "response_format", "structured_outputs", "system", "text", "tokens", "tools",
)  # fmt: skip
MAX_SMALL_BYTES = 256 << 10

_decoder = msgspec.json.Decoder(Fields)
_large_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, msgspec.Raw, msgspec.Raw()) for name in MAY_BE_LARGE])
)
BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def split(body: bytes | memoryview) -> tuple[Fields, bool]:
    """Return the top-level fields as raw JSON, and whether something was left out.

    Raises:
        BodyRefused: it is not a JSON object, or what should be small in it is not.
    """
    try:
        if len(body) > MAX_SMALL_BYTES:
            _check_small(body)
        fields = _decoder.decode(body)
    except BAD_JSON as error:
        raise BodyRefused(400, "invalid_json", f"the body is not a JSON object: {error}") from error
    if _XARGS not in fields and fields.keys().isdisjoint(_NOT_FOR_CLIENTS):
        return fields, False
    fields = {k: v for k, v in fields.items() if k not in _NOT_FOR_CLIENTS}
    if _XARGS in fields:
        fields[_XARGS] = _without_transfers(fields[_XARGS])
    return fields, True


def _check_small(body: bytes | memoryview) -> None:
    """Refuse a body that has much outside of the fields that may be large; skips all others."""
    large = _large_decoder.decode(body)
    num_bytes = len(body) - sum(len(memoryview(getattr(large, name))) for name in MAY_BE_LARGE)
    if num_bytes > MAX_SMALL_BYTES:
        message = f"the fields beside {', '.join(MAY_BE_LARGE)} have {num_bytes} bytes"
        raise BodyRefused(400, "too_many_fields", f"{message}; at most {MAX_SMALL_BYTES} are taken")


def _without_transfers(arguments: msgspec.Raw) -> msgspec.Raw:
    """Return a client's `vllm_xargs`; what is no object is left to vLLM, which refuses it.

    Raises:
        BodyRefused: it has a name that only a less strict reader takes.
    """
    try:
        fields = _decoder.decode(arguments)
    except msgspec.ValidationError:
        return arguments
    except BAD_JSON as error:
        raise BodyRefused(400, "invalid_json", f"{_XARGS} is not valid JSON: {error}") from error
    kept = {k: v for k, v in fields.items() if k not in _NOT_IN_XARGS}
    return msgspec.Raw(msgspec.json.encode(kept))
