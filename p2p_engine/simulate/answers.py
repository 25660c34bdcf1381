"""The answers of a stand-in: a function of the request alone, in the forms of OpenAI's APIs and
Anthropic's. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NUM_TOKENS = 8
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
_MAX_TOKENS = 10_000

Asked = Mapping[str, Any]


def tokens(asked: Asked) -> list[str]:
    """Return the made-up continuation of a prompt. One token is a number and an accent."""
    prompt = asked.get("messages") or asked.get("prompt") or asked.get("input")
    seed = zlib.crc32(str(prompt).encode(errors="replace")) % 997
    return [f" {(seed + position) % 997}é" for position in range(num_tokens(asked))]


def num_tokens(asked: Asked) -> int:
    """Return how many tokens are generated."""
    names = ("max_output_tokens",) if "input" in asked else ("max_tokens", "max_completion_tokens")
    asked_for = next(filter(None, map(asked.get, names)), NUM_TOKENS)
    return min(int(asked_for), _MAX_TOKENS)


def answer(
    path: str,
    asked: Asked,
    params: Mapping[str, Any] | None = None,
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the answer of a path to a request without streaming."""
    if path == MESSAGES:
        return _message(asked, tokens(asked), params, usage)
    if path == RESPONSES:
        return _response(asked, tokens(asked), params, usage)
    return completion(asked, params, usage)


def stream(path: str, asked: Asked, usage: Mapping[str, Any] | None = None) -> list[bytes]:
    """Return the events of the streamed answer of a path."""
    if path == MESSAGES:
        return _named(_message_events(asked, usage))
    if path == RESPONSES:
        return _named(_response_events(asked, usage))
    return events(asked, usage)


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


def _named(content: Iterable[dict[str, Any]]) -> list[bytes]:
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in content]


def _message(
    asked: Asked,
    said: list[str],
    params: Mapping[str, Any] | None,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a whole message; vLLM leaves out what is null."""
    return {
        "id": "chatcmpl-1", "type": "message", "role": "assistant",
        "content": [{"type": "text", "text": "".join(said)}], "model": asked.get("model"),
        "stop_reason": "max_tokens", "usage": _counted(usage, len(said)),
        **({"kv_transfer_params": params} if params else {}),
    }  # fmt: skip


def _message_events(asked: Asked, usage: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    begun = {**_message(asked, [], None, usage), "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": begun}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for token in tokens(asked):
        delta = {"type": "text_delta", "text": token}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    counted = _counted(usage, num_tokens(asked))
    yield {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": counted}
    yield {"type": "message_stop"}


def _response(
    asked: Asked,
    said: list[str],
    params: Mapping[str, Any] | None,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    text = {"type": "output_text", "text": "".join(said), "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [text]}
    counted = {**_counted(usage, len(said)), "input_tokens_details": {"cached_tokens": 0}}
    return {
        "id": "resp_1", "object": "response", "model": asked.get("model"), "status": "incomplete",
        "output": [item], "usage": counted, "kv_transfer_params": params,
    }  # fmt: skip


def _response_events(asked: Asked, usage: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    done = _response(asked, tokens(asked), None, usage)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for token in tokens(asked):
        yield {"type": "response.output_text.delta", "item_id": "msg_1", "delta": token}
    yield {"type": "response.output_item.done", "item": done["output"][0]}
    yield {"type": "response.completed", "response": done}


def _counted(usage: Mapping[str, Any] | None, num_new: int) -> dict[str, int]:
    return {"input_tokens": (usage or {}).get("prompt_tokens", 0), "output_tokens": num_new}
