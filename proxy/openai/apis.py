"""Apis: how the APIs differ by whose requests a prompt is prefilled and decoded; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from proxy.errors import ProxyError
from proxy.http.memory import Span
from proxy.openai.fields import BAD_JSON

Fields = Mapping[str, msgspec.Raw | Span]

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
# What vLLM's answers say that were aborted at shutdown. The patterns cannot match inside a text,
# because quotes are escaped there. In a stream, only a finish reason can be trusted.
_REASON = re.compile(rb'"finish_reason": ?"abort"')
_NO_TOKEN = re.compile(
    rb'"usage": ?\{"input_tokens": ?\d+, ?(?:"input_tokens_details": ?\{[^{}]*\}, ?)?'
    rb'"output_tokens": ?0[,}]'
)
# How a stream begins where vLLM notices only in it what it would have answered 503 to.
_CODE = re.compile(rb'\Adata: ?\{"error": ?\{[^{}]*"code": ?503[,}]')
_OVERLOADED = re.compile(rb'\Aevent: error\ndata: ?\{.*"type": ?"overloaded_error"[,}]')
_NAMED_CODE = re.compile(rb'^event: error\ndata: ?\{.*"code": ?"?503"?[,}]', re.M)
# The first event of a response that comes of the engine, with its data.
_OF_ENGINE = re.compile(rb"^event: (?!response\.(?:created|in_progress)\n).+\ndata: .*\n", re.M)
_OFF = (b"false", b"null")
_STATE = {
    "background": "its answer would be kept by one instance",
    "previous_response_id": "one instance may have kept that response; send its items as `input`",
    "store": "one instance would keep the answer; leave it out, or say false",
}
# Others are run by vLLM, which sends what they say as a second prompt, with the same parameters.
_CLIENTS_TOOLS = {"function", "custom", "namespace"}
MAX_TOOLS_BYTES = 2 << 20


class _Typed(msgspec.Struct):
    type: str


_typed_decoder = msgspec.json.Decoder(_Typed)
_tools_decoder: msgspec.json.Decoder[list[_Typed] | None] = msgspec.json.Decoder(
    list[_Typed] | None
)


@dataclass(frozen=True)
class Api:
    """One API, by the names of its fields."""

    prompt: str
    limit: str = "max_tokens"
    # In an answer: what was generated, which may be nothing yet; and the tokens of the prompt.
    generated: str = "choices"
    may_be_empty: bool = False
    prompt_tokens: str = "prompt_tokens"
    aborted: re.Pattern[bytes] = _REASON
    # How a stream begins that was refused, and how far it is to be read to know.
    unavailable: re.Pattern[bytes] = _CODE
    tells: re.Pattern[bytes] = re.compile(rb"(?s).")
    has_choices: bool = True
    # `/tokenize` makes of its requests what vLLM would compute.
    is_tokenized: bool = True
    # Its events have names.
    has_events: bool = False
    is_anthropic: bool = False
    # What is refused, because one instance would keep it; and what is said where nothing is.
    state: tuple[str, ...] = ()
    said: Mapping[str, msgspec.Raw] = field(default_factory=dict)

    def check(self, fields: Fields) -> None:
        """Refuse what the proxy cannot do with several instances.

        Raises:
            ProxyError: 400, with the field.
        """
        for name in self.state:
            if name in fields and _content(fields[name]) not in _OFF:
                raise state_refused(f"`{name}` is not taken: {_STATE[name]}", name)
        if self.state and "tools" in fields:
            _check_tools(fields["tools"])

    def computes_alone(self, fields: Fields) -> bool:
        """Tell whether prefill would compute another prompt than decode, or fail with one token."""
        if self.limit == "max_output_tokens":  # what is cut off depends on it
            return _content(fields.get("truncation", b'"disabled"')) != b'"disabled"'
        # vLLM parses the arguments of the tool, of which one token is no JSON.
        return self.is_anthropic and type_of(fields, "tool_choice") == "tool"

    def event_of(self, error: ProxyError) -> bytes:
        """Return the event that ends a stream that broke."""
        said = msgspec.json.encode(error.body(is_anthropic=self.is_anthropic))
        if not self.has_events:
            return b"data: %b\n\n" % said
        named = said if self.is_anthropic else b'{"type":"error",' + said[1:]
        return b"event: error\ndata: %b\n\n" % named


COMPLETIONS = Api("prompt")
APIS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": Api("messages"),
    MESSAGES_PATH: Api(
        "messages", generated="content", prompt_tokens="input_tokens", aborted=_NO_TOKEN,
        unavailable=_OVERLOADED,
        has_choices=False, is_tokenized=False, has_events=True, is_anthropic=True,
    ),
    RESPONSES_PATH: Api(
        "input", limit="max_output_tokens", generated="output", may_be_empty=True,
        prompt_tokens="input_tokens", aborted=_NO_TOKEN,
        unavailable=_NAMED_CODE, tells=_OF_ENGINE,
        has_choices=False, is_tokenized=False, has_events=True,
        state=tuple(_STATE), said={"store": msgspec.Raw(b"false")},
    ),
}  # fmt: skip

# Where vLLM takes transfers, too, and the proxy takes no requests; and what a client does instead.
_MAKES_NO_TOKENS = "nothing is generated there; ask an instance"
CLOSED = {
    "/inference/v1/generate": "send the token ids to /v1/completions, as `prompt`",
    "/v1/chat/completions/batch": "send each conversation to /v1/chat/completions",
    "/cohere/v2/chat": "send the conversation to /v1/chat/completions",
    "/invocations": "send the request to the path of its API",
    **{
        f"{path}/{way}": _MAKES_NO_TOKENS
        for way, paths in {
            "render": (*APIS, "/cohere/v2/chat"),
            "derender": ("/v1/completions", "/v1/chat/completions"),
        }.items()
        for path in paths
    },
}


def api_of(path: str) -> Api:
    """Return the API of a path; of paths that one instance answers alone, that of completions."""
    return APIS.get(path, COMPLETIONS)


def is_anthropic(path: str) -> bool:
    """Tell whether errors of a path have Anthropic's form."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def state_refused(message: str, field_name: str | None = None) -> ProxyError:
    """Return the error of what only one instance could know."""
    return ProxyError(400, "kept_by_one_instance", message, param=field_name)


def type_of(fields: Fields, name: str) -> str:
    """Return the `type` within a small field; "" if it has none."""
    try:
        return _typed_decoder.decode(_content(fields.get(name, b"")) or b"null").type
    except BAD_JSON:
        return ""


def _check_tools(tools: msgspec.Raw | Span) -> None:
    if isinstance(tools, Span) and len(tools) > MAX_TOOLS_BYTES:
        message = f"`tools` has {len(tools)} bytes; at most {MAX_TOOLS_BYTES} are taken here"
        raise ProxyError(400, "too_many_tools", message, param="tools")
    content = tools.read(0, len(tools)) if isinstance(tools, Span) else tools
    try:
        types = {tool.type for tool in _tools_decoder.decode(content) or ()}
    except BAD_JSON as error:
        message = f"`tools` is not a list of tools with types: {error}"
        raise ProxyError(400, "builtin_tool", message, param="tools") from error
    for kind in sorted(types - _CLIENTS_TOOLS):
        message = f"an instance would run the tool `{kind[:64]}`; only the client's tools are taken"
        raise ProxyError(400, "builtin_tool", message, param="tools")


def _content(value: msgspec.Raw | Span | bytes) -> bytes:
    """Return the JSON of a small value; b"" of a large one."""
    return b"" if isinstance(value, Span) else bytes(value)
