"""Anthropic's messages and OpenAI's responses: how they are asked for, what their answers say."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

SECONDS = 120.0
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def post(url: str, asked: dict[str, Any]) -> str:
    """Post a request for greedy tokens to the model `tiny`, and return the answer's text."""
    request = urllib.request.Request(
        url,
        data=json.dumps({"model": "tiny", "temperature": 0, **asked}).encode(),
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=SECONDS) as response:
        text: str = response.read().decode()
    return text


def said(text: str, *, is_stream: bool) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its usage; both must be there."""
    if not is_stream:
        answer = json.loads(text)
        parts = [part for item in answer.get("output", [answer]) for part in item["content"]]
        return "".join(part["text"] for part in parts), counts(answer["usage"])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not [event for event in events if event["type"] == "error"]
    deltas = [event["delta"] for event in events if event["type"].endswith("_text.delta")]
    deltas += [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    ends = [event.get("response", event) for event in events]
    return "".join(deltas), counts([end["usage"] for end in ends if end.get("usage")][-1])


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """What was read, cached and answered."""
    details = usage.get("input_tokens_details", usage)
    cached = details.get("cached_tokens", details.get("cache_read_input_tokens"))
    return {
        "read": usage["input_tokens"], "cached": cached, "answered": usage["output_tokens"],
    }  # fmt: skip
