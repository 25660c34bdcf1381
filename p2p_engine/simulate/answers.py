"""The answers of a stand-in: a function of the request alone, in the forms of OpenAI's API.
Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

NUM_TOKENS = 8
_MAX_TOKENS = 10_000

Asked = Mapping[str, Any]


def tokens(asked: Asked) -> list[str]:
    """Return the made-up continuation of a prompt. One token is a number and an accent."""
    prompt = asked.get("messages") or asked.get("prompt")
    seed = zlib.crc32(str(prompt).encode(errors="replace")) % 997
    return [f" {(seed + position) % 997}é" for position in range(num_tokens(asked))]


def num_tokens(asked: Asked) -> int:
    """Return how many tokens are generated."""
    asked_for = asked.get("max_tokens") or asked.get("max_completion_tokens") or NUM_TOKENS
    return min(int(asked_for), _MAX_TOKENS)


def completion(
    asked: Asked, params: Mapping[str, Any] | None = None, usage: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the answer to a request without streaming, with `kv_transfer_params` for decode."""
    text = "".join(tokens(asked))
    content = {"message": {"role": "assistant", "content": text}} if is_chat(asked) else {}
    choices = [
        {"index": index, **(content or {"text": text}), "finish_reason": "length"}
        for index in range(num_choices(asked))
    ]
    counted = {"usage": usage} if usage else {}
    return {**_head(asked), "choices": choices, **counted, "kv_transfer_params": params}


def events(asked: Asked, usage: Mapping[str, Any] | None = None) -> list[bytes]:
    """Return the events of a streamed answer: one for each token of each choice, then the end."""
    chunks: list[dict[str, Any]] = []
    head = {**_head(asked), **({"object": "chat.completion.chunk"} if is_chat(asked) else {})}
    for token in tokens(asked):
        content = {"delta": {"content": token}} if is_chat(asked) else {"text": token}
        chunks += [
            {**head, "choices": [{"index": index, **content}]}
            for index in range(num_choices(asked))
        ]
    if usage and (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]
    return [f"data: {line}\n\n".encode() for line in lines]


def num_choices(asked: Asked) -> int:
    """Return how many continuations are wanted, over all prompts."""
    given = asked.get("prompt")
    num_prompts = 1
    if isinstance(given, list) and given and not isinstance(given[0], int):
        num_prompts = len(given)
    return int(asked.get("n") or 1) * num_prompts


def is_chat(asked: Asked) -> bool:
    """Whether a request is a chat, not a completion."""
    return "messages" in asked


def _head(asked: Asked) -> dict[str, Any]:
    kind = "chat.completion" if is_chat(asked) else "text_completion"
    return {"id": "cmpl-1", "object": kind, "model": asked.get("model")}
