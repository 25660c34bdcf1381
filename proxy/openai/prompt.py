"""Prompt: what routing wants to know of a request; pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec

from proxy.openai import payload

if TYPE_CHECKING:
    from proxy.openai.payload import Fields

Value = TypeVar("Value", int, str)

# A guess that serves text and lists of token ids alike: it weighs requests, it counts nothing.
BYTES_PER_TOKEN = 4
BLOCK_BYTES = 256
TOKENS_PER_BLOCK = BLOCK_BYTES // BYTES_PER_TOKEN
# What a request is expected to generate when it says nothing, and at most: limits are seldom met.
EXPECTED_OUTPUT_TOKENS = 256
_TEXTS = ("prompt", "messages", "input")
# What vLLM puts in front of, or mixes into, the prompt: equal texts share KV only if these agree.
_CONTEXT = ("model", "tools", "chat_template", "chat_template_kwargs", "cache_salt")
_ABOUT_THE_PROMPT = {"prompt_logprobs", "echo", "use_beam_search"}
_NOTHING = (b"", b"null", b"false")


@dataclass(eq=False)
class Prompt:
    """One request as the policies see it. `text` is the prompt as the client wrote it, in JSON."""

    model: str | None = None
    session: str = ""
    text: bytes = b""
    context: tuple[bytes, ...] = ()
    num_output_tokens: int = EXPECTED_OUTPUT_TOKENS
    # It asks for something about the prompt itself, which only who computes the prompt can tell.
    needs_whole_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        """The estimated length of the prompt; at least 1."""
        return max(1, len(self.text) // BYTES_PER_TOKEN)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """One hash for the context and one for each whole block of the text."""
        text = self.text
        ends = range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES)
        return (hash(self.context), *(hash(text[end - BLOCK_BYTES : end]) for end in ends))

    def num_new_tokens(self, num_held_blocks: int) -> int:
        """Return what is left to compute for one that holds so many of `blocks`."""
        held = max(0, num_held_blocks - 1) * TOKENS_PER_BLOCK
        return max(0, self.num_tokens - held)


def read_prompt(fields: Fields, session: str = "") -> Prompt:
    """Read a request; a value of a wrong type is read as if it were not there.

    `session` is what the client calls its session; without it, the field `user` does.
    """
    text = next((bytes(fields[name]) for name in _TEXTS if name in fields), b"")
    return Prompt(
        model=payload.model_of(fields),
        session=session or _value(fields, "user", str, ""),
        text=text,
        context=tuple([bytes(fields[name]) if name in fields else b"" for name in _CONTEXT]),
        num_output_tokens=_num_output_tokens(fields),
        needs_whole_prompt=_needs_whole_prompt(fields),
    )


def _num_output_tokens(fields: Fields) -> int:
    asked = _value(fields, "max_tokens", int, 0) or _value(fields, "max_completion_tokens", int, 0)
    return min(max(asked, 0) or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)


def _needs_whole_prompt(fields: Fields) -> bool:
    """Its log-probabilities are not in its KV, and beam search gives its children new names."""
    asked = _ABOUT_THE_PROMPT & fields.keys()
    return any(bytes(fields[name]) not in _NOTHING for name in asked)


def _value(fields: Fields, name: str, kind: type[Value], default: Value) -> Value:
    if name not in fields:
        return default
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except payload.BAD_JSON:
        return default
