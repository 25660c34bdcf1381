"""Prompt: the facts about a request that routing uses; pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from proxy.fleet.held_blocks import Sighting
from proxy.fleet.last_turns import TurnText
from proxy.http.memory import Span
from proxy.openai import payload
from proxy.openai.apis import COMPLETIONS, Api
from proxy.openai.fields import BAD_JSON

if TYPE_CHECKING:
    from proxy.openai.payload import Fields

Value = TypeVar("Value")
# Prompts may be large, and are not copied.
Text: TypeAlias = bytes | memoryview | Span

# An estimate for text and for lists of token ids; it is used to weigh requests only.
BYTES_PER_TOKEN = 4
BLOCK_BYTES = 256
# Blocks of one prompt that routing compares: its first 2 MiB. More would hold up other requests.
MAX_BLOCKS = 8192
TOKENS_PER_BLOCK = BLOCK_BYTES // BYTES_PER_TOKEN
# Of two turns of a session, so much of the shared text is compared at each of its ends.
COMPARED_BYTES = 64 << 10
# Estimated output tokens if the request sets no limit; also the maximum, as limits are seldom met.
EXPECTED_OUTPUT_TOKENS = 256
_TEXTS = ("prompt", "messages", "input")  # of what has no API of its own
# Fields that change the prompt's KV: equal texts share KV only if these are equal, too.
_CONTEXT = (
    "model", "tools", "chat_template", "chat_template_kwargs", "cache_salt", "system",
    "instructions", "previous_input_messages",
)  # fmt: skip
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ABOUT_THE_PROMPT = {"prompt_logprobs", "echo", "use_beam_search"}
_NOTHING = (b"", b"null", b"false")


@dataclass(eq=False)
class Prompt:
    """One request, as policies see it. `text` is the prompt in the client's JSON."""

    model: str | None = None
    session: str = ""
    text: Text = b""
    context: tuple[bytes | memoryview, ...] = ()
    num_output_tokens: int = EXPECTED_OUTPUT_TOKENS
    # It asks about the prompt itself, so the instance that decodes must compute the prompt.
    needs_whole_prompt: bool = False
    salt: str = ""
    # What is known of its blocks; None: nothing.
    sighting: Sighting | None = None

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens, estimated where it is not known; at least 1."""
        known = self.sighting.num_tokens if self.sighting is not None else 0
        return known or max(1, len(self.text) // BYTES_PER_TOKEN)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """One hash for the context, then one for each whole block of the text, up to
        `MAX_BLOCKS`."""
        most = MAX_BLOCKS * BLOCK_BYTES
        text = self._read(0, most)
        ends = range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES)
        hashes = (hash(bytes(text[end - BLOCK_BYTES : end])) for end in ends)
        return (hash(tuple(map(bytes, self.context))), *hashes)

    def beginning(self) -> TurnText:
        """Return what a prompt that goes on with this one begins with."""
        num_bytes = len(self.text)
        last = bytes(self._read(max(0, num_bytes - COMPARED_BYTES), num_bytes))
        return self._beginning(num_bytes - len(last) + len(last[:-1].rstrip()))

    def goes_on_with(self, earlier: TurnText) -> bool:
        """Tell whether this prompt seems to go on with an earlier one, or repeats it."""
        return earlier.length <= len(self.text) and self._beginning(earlier.length) == earlier

    def _beginning(self, length: int) -> TurnText:
        first = self._read(0, min(length, COMPARED_BYTES))
        last = self._read(max(0, length - COMPARED_BYTES), length)
        return TurnText(length, hash((*map(bytes, self.context), bytes(first), bytes(last))))

    def _read(self, start: int, end: int) -> bytes | memoryview:
        text = self.text
        return text.read(start, end) if isinstance(text, Span) else text[start:end]

    def num_new_tokens(self, num_held_blocks: int) -> int:
        """Return the estimated tokens left to compute for a holder of the first
        `num_held_blocks`."""
        held = max(0, num_held_blocks - 1) * TOKENS_PER_BLOCK
        return max(0, self.num_tokens - held)


class _Metadata(msgspec.Struct):
    user_id: str = ""


_metadata = msgspec.json.Decoder(_Metadata)
_number = msgspec.json.Decoder(int)
_string = msgspec.json.Decoder(str)


def read_prompt(fields: Fields, session: str = "", api: Api = COMPLETIONS) -> Prompt:
    """Read a request; a value of a wrong type counts as missing.

    `session` is the client's session id; without one, the field `user` is used, or Anthropic's
    `metadata.user_id`.
    """
    texts = (_text(fields[name]) for name in (api.prompt, *_TEXTS) if name in fields)
    return Prompt(
        model=payload.model_of(fields),
        session=session or _user(fields, api),
        text=next(texts, b""),
        context=tuple([_compared(fields[n]) if n in fields else b"" for n in _CONTEXT]),
        num_output_tokens=_num_output_tokens(fields),
        needs_whole_prompt=_needs_whole_prompt(fields) or api.computes_alone(fields),
        salt=_value(fields, "cache_salt", _string, ""),
    )


def _text(value: payload.Value) -> Text:
    return value if isinstance(value, Span) else memoryview(value)


def _compared(value: payload.Value) -> bytes | memoryview:
    return value.digest if isinstance(value, Span) else memoryview(value)


def _num_output_tokens(fields: Fields) -> int:
    asked = 0
    for name in _LIMITS:
        asked = asked or _value(fields, name, _number, 0)
    return min(max(asked, 0) or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)


def _user(fields: Fields, api: Api) -> str:
    if api.is_anthropic:
        return _value(fields, "metadata", _metadata, _Metadata()).user_id
    return _value(fields, "user", _string, "")


def _needs_whole_prompt(fields: Fields) -> bool:
    """Prompt log-probabilities are not in the KV, and beam search renames its child requests."""
    asked = _ABOUT_THE_PROMPT & fields.keys()
    return any(payload.small(fields, name, b"?") not in _NOTHING for name in asked)


def _value(
    fields: Fields, name: str, decoder: msgspec.json.Decoder[Value], default: Value
) -> Value:
    if name not in fields:
        return default
    try:
        return decoder.decode(payload.small(fields, name))
    except BAD_JSON:
        return default
