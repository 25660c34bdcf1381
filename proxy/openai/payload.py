"""Builds the bodies of both legs from the client's; moves values without parsing them; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from proxy.http.memory import Parts, Span
from proxy.openai.apis import COMPLETIONS, Api, type_of
from proxy.openai.fields import BAD_JSON, KV_PARAMS, split

if TYPE_CHECKING:
    from p2p_engine.wire.request_ids import ProxyId

# A large value lies in the file of large bodies.
Value: TypeAlias = msgspec.Raw | Span
Fields: TypeAlias = dict[str, Value]
Params: TypeAlias = dict[str, Any]
Answered: TypeAlias = dict[str, msgspec.Raw]  # parameters, by a prefill instance

_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_TRUE = b"true"
# Of a request that decode computes by itself, on purpose.
NO_TRANSFER: Params = {"do_remote_prefill": False, "do_remote_decode": False}
# Fields without meaning for a single token that nobody reads, or that only make the answer longer.
_NOT_FOR_PREFILL = (
    "min_tokens", "stream_options",
    "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "return_prompt_text", "return_mm_kwargs",
    "include", "enable_response_messages",
)  # fmt: skip
# Of a prefill instance's answer: one token for each choice, and what it says of its KV.
MAX_PREFILL_BYTES = 4 << 20
MAX_PARAMS_BYTES = 256 << 10
MAX_DIGITS = 9  # of a number of choices; vLLM takes 16,384 of them by default


@dataclass(frozen=True, eq=False)
class ClientRequest:
    """A client's request: its body, and its top-level fields as raw JSON, without those that only
    the proxy may set."""

    body: Parts
    fields: Fields

    @property
    def is_stream(self) -> bool:
        """Tell whether the client wants server-sent events."""
        return small(self.fields, "stream") == _TRUE


NOTHING = ClientRequest((), {})


@dataclass(frozen=True)
class Prefilled:
    """A prefill instance's answer: its parameters for decode, and its token counts.

    `counts` are those that are true of the whole answer, by their names in `usage`; they are empty
    if it does not say how much was cached.
    """

    params: Answered
    counts: Mapping[str, int]
    prompt_tokens: int = 0


UNREAD = Prefilled({}, {})  # of an answer that is too long


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """What the APIs call the tokens of the prompt and those that were cached. Anthropic's
    `input_tokens` are the others."""

    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = 0
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _PrefillAnswer(msgspec.Struct):
    """The parts stay raw, so that no number of them costs the event loop much."""

    choices: msgspec.Raw = msgspec.Raw(b"null")
    content: msgspec.Raw = msgspec.Raw(b"null")
    output: msgspec.Raw = msgspec.Raw(b"null")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"null")


_model_decoder: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(str | None)
_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)
_params_decoder: msgspec.json.Decoder[Answered | None] = msgspec.json.Decoder(Answered | None)
_usage_decoder: msgspec.json.Decoder[_Usage | None] = msgspec.json.Decoder(_Usage | None)


def parse(body: bytes) -> ClientRequest:
    """Split a request into its top-level fields, as raw JSON.

    The body stays as it is, unless it has something that only the proxy may say.

    Raises:
        BodyRefused: it is not a JSON object, or what should be small in it is not.
    """
    fields, is_changed = split(body)
    whole = msgspec.json.encode(fields) if is_changed else body.rstrip(b" \t\r\n")
    return ClientRequest((whole,), dict(fields))


def small(fields: Fields, name: str, missing: bytes = b"") -> bytes:
    """Return the JSON of a value that is small if it makes sense; `missing` if it does not."""
    value = fields.get(name, missing)
    return missing if isinstance(value, Span) else bytes(value)


def model_of(fields: Fields) -> str | None:
    """Return the requested model; None if it is not a string."""
    try:
        return _model_decoder.decode(small(fields, "model", b"null"))
    except BAD_JSON:
        return None


def num_choices(fields: Fields, api: Api = COMPLETIONS) -> int:
    """Return the number of continuations of each prompt."""
    given = small(fields, "n", b"1") if api.has_choices else b"1"
    return int(given) if given.isdigit() and len(given) <= MAX_DIGITS else 1


def prefill_body(fields: Fields, params: Params | None, api: Api = COMPLETIONS) -> Parts:
    """Return the prefill body: one token, no stream, and nothing that only decode's answer needs.
    `n` stays: each choice is a separate transfer."""
    kept: dict[str, Any] = {k: v for k, v in fields.items() if k not in _NOT_FOR_PREFILL}
    kept |= {api.limit: _ONE, "stream": _FALSE}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    if "thinking" in kept and type_of(fields, "thinking") == "enabled":
        del kept["thinking"]  # a limit of tokens, which must be below that of the answer
    if params is not None:
        kept[KV_PARAMS] = params
    return joined(kept)


def joined(fields: dict[str, Any]) -> Parts:
    """Return fields as one JSON object; the large ones come last."""
    large = [(name, value) for name, value in fields.items() if isinstance(value, Span)]
    if not large:
        return (msgspec.json.encode(fields),)
    others = {k: v for k, v in fields.items() if not isinstance(v, Span)}
    parts: list[bytes | Span] = []
    begin = msgspec.json.encode(others)[:-1] + (b"," if others else b"")
    for name, value in large:
        parts += [b"%b%b:" % (begin, msgspec.json.encode(name)), value]
        begin = b","
    return (*parts, b"}")


def decode_body(asked: ClientRequest, params: Params | None) -> Parts:
    """Return the client's body with our parameters spliced in before the last brace."""
    return asked.body if params is None else _with(asked, {KV_PARAMS: params})


def prepared(asked: ClientRequest, api: Api) -> ClientRequest:
    """Return a request that also says what its API must say.

    Raises:
        ProxyError: 400, it wants what the proxy cannot do with several instances.
    """
    api.check(asked.fields)
    more = {name: value for name, value in api.said.items() if name not in asked.fields}
    return ClientRequest(_with(asked, more), {**asked.fields, **more}) if more else asked


def _with(asked: ClientRequest, more: Mapping[str, Any]) -> Parts:
    """Return a body with more fields before its last brace."""
    *firsts, last = asked.body
    comma = b"," if asked.fields else b""
    ours = comma + msgspec.json.encode(more)[1:]
    if isinstance(last, Span):
        return (*firsts, last.part(0, len(last) - 1), ours)
    return (*firsts, b"".join((memoryview(last)[:-1], ours)))


def request_id(proxy_id: ProxyId) -> str:
    """Return the request id of both legs: the old form with both addresses, if both are known."""
    is_whole = proxy_id.prefill and proxy_id.decode
    return str(proxy_id) if is_whole else proxy_id.transfer_id


def prefill_params(proxy_id: ProxyId, last: ProxyId | None = None, num_present: int = 0) -> Params:
    """Return the parameters that name the decode instance as the destination of the KV.

    If its KV address is unknown, they are None: prefill holds the KV and answers with its own
    address. If the session's last turn is known, they name it and the instance that has its KV, and
    say of how many tokens decode should have the KV (`num_present`).
    """
    host, port = _split(proxy_id.decode)
    earlier: Params = {}
    if last is not None:
        stashed_host, stashed_port = _split(last.decode)
        earlier = {
            "stashed_as": last.transfer_id,
            "stashed_host": stashed_host,
            "stashed_port": stashed_port,
        }
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": proxy_id.transfer_id,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": None,
        "remote_block_ids": None,
        "remote_engine_id": None,
        **({"remote_has_tokens": num_present} if num_present else {}),
        **earlier,
    }


def decode_params(proxy_id: ProxyId, answered: Answered, *, keeps: bool = False) -> Params:
    """Return the parameters that name the source of the KV; those of prefill's answer take
    precedence. They say whether decode `keeps` the KV for the session's next turn."""
    host, port = _split(proxy_id.prefill)
    ours = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": proxy_id.transfer_id,
        "remote_host": host,
        "remote_port": port,
    }
    return {**ours, **answered, "stash": keeps and bool(proxy_id.decode)}


def read_prefill(answer: bytes, api: Api = COMPLETIONS) -> Prefilled:
    """Read a prefill instance's answer; its parameters may be missing.

    Raises:
        ValueError: it is not a completion.
    """
    try:
        said = _answer_decoder.decode(answer)
        if not _is_list(getattr(said, api.generated), may_be_empty=api.may_be_empty):
            raise msgspec.ValidationError(f"no {api.generated}")
        params = _params_decoder.decode(_bounded(said.kv_transfer_params)) or {}
        usage = _usage_decoder.decode(_bounded(said.usage)) or _Usage()
    except BAD_JSON as error:
        raise ValueError(f"{len(answer)} bytes that are no completion: {error}") from error
    return Prefilled(params, *_read_usage(usage, api))


def _read_usage(usage: _Usage, api: Api) -> tuple[Mapping[str, int], int]:
    """Return the counts that are true of the whole answer, and the tokens of the prompt."""
    if api.is_anthropic:
        cached = {
            "cache_read_input_tokens": usage.cache_read_input_tokens,
            "cache_creation_input_tokens": usage.cache_creation_input_tokens,
        }
        known = {name: number for name, number in cached.items() if number is not None}
        counts = {"input_tokens": usage.input_tokens, **known}
        return counts if known else {}, sum(counts.values())
    details: _PromptDetails | None = getattr(usage, f"{api.prompt_tokens}_details")
    num_prompt: int = getattr(usage, api.prompt_tokens)
    if details is None or details.cached_tokens is None:
        return {}, num_prompt
    return {"cached_tokens": details.cached_tokens}, num_prompt


def _is_list(value: msgspec.Raw, *, may_be_empty: bool) -> bool:
    is_list = bytes(memoryview(value)[:1]) == b"["
    return is_list and (may_be_empty or bytes(value)[1:].lstrip()[:1] != b"]")


def _bounded(value: msgspec.Raw) -> msgspec.Raw:
    if len(memoryview(value)) > MAX_PARAMS_BYTES:
        raise msgspec.ValidationError(f"a part of more than {MAX_PARAMS_BYTES} bytes")
    return value


@lru_cache(1024)  # of few instances
def _split(address: str) -> tuple[str, int] | tuple[None, None]:
    if not address:
        return None, None
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
