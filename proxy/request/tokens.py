"""PromptTokens: asks which instances hold how much of a request's prompt, before one is chosen.

Blocks are found by tokens. A prompt of token ids has them; for another one an instance is asked,
whose `/tokenize` makes of a prompt or a chat what it would compute.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING

from proxy.errors import LegFailed, ProxyError
from proxy.http.client import ClientError, Limits
from proxy.http.memory import PIECE_BYTES, Span
from proxy.openai import payload
from proxy.openai.answers import read
from proxy.routing.router import NoInstance

if TYPE_CHECKING:
    from proxy.fleet.held_blocks import HeldBlocks, Sighting
    from proxy.http.asgi import ProxyRequest
    from proxy.openai.prompt import Prompt
    from proxy.request.services import Services
    from proxy.routing.router import Router

PATH = "/tokenize"
TOKENIZE_SECONDS = 2.0
# Shorter prompts are computed sooner than they are looked up.
MIN_TOKENS = 256
MAX_BYTES = 2 << 20  # of a prompt, and of its ids as JSON: about 300,000 of them
MAX_AT_ONCE = 64  # prompts that instances are asked for the tokens of
# What makes the tokens of a prompt.
_FIELDS = (
    "model", "prompt", "messages", "tools", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
_IDS = re.compile(rb"\[\s*\d")
_MESSAGES = re.compile(rb"\[\s*\{")
_TEXT = re.compile(rb'"')
# How media in a chat end in JSON, where a quote within a text has a backslash before it. They would
# be fetched and processed once more; and their blocks have other keys.
_MEDIA = (b'_url"', b'_embeds"', b'_pil"', b'input_audio"', b'input_image"')
_LONGEST_END = max(map(len, _MEDIA))


class PromptTokens:
    """Looks prompts up. Whatever fails leaves a prompt to the guess by its text."""

    def __init__(self, services: Services, router: Router, held: HeldBlocks) -> None:
        self._services = services
        self._router = router
        self._held = held
        self._num_asking = 0

    async def sight(
        self, request: ProxyRequest, fields: payload.Fields, prompt: Prompt
    ) -> Sighting | None:
        """Return what is held of a prompt; None if that does not matter, or is not found in time.

        Waits for `TOKENIZE_SECONDS` and the look-up at most.
        """
        is_wanted = self._router.weighs_prefixes and self._held.is_of_use
        if not is_wanted or prompt.num_tokens < MIN_TOKENS:
            return None
        tokens = await self._tokens(request, fields, prompt)
        if tokens is None:
            return None
        is_adapter = self._router.line_of(prompt.model) is None
        lora = prompt.model if is_adapter and prompt.model else ""
        return await self._held.find(tokens, lora, prompt.salt)

    async def _tokens(
        self, request: ProxyRequest, fields: payload.Fields, prompt: Prompt
    ) -> bytes | None:
        is_chat = "messages" in fields
        asked = await _content(fields.get("messages" if is_chat else "prompt"))
        if not is_chat and _IDS.match(asked):
            return asked
        is_text = (_MESSAGES if is_chat else _TEXT).match(asked)
        if not is_text or (is_chat and await _has_media(asked)):
            return None
        if self._num_asking >= MAX_AT_ONCE:
            return None
        self._num_asking += 1
        try:
            return await self._ask(request, fields, prompt.model)
        finally:
            self._num_asking -= 1

    async def _ask(
        self, request: ProxyRequest, fields: payload.Fields, model: str | None
    ) -> bytes | None:
        body = payload.joined({name: fields[name] for name in _FIELDS if name in fields})
        try:
            instance, role = self._router.choose_any(model)
            response = await self._services.upstream.post(
                instance, role, PATH, body, self._headers(request), self._limits()
            )
        except (NoInstance, LegFailed, ProxyError):
            return None
        try:
            answer = await read(response, MAX_BYTES)
        except ClientError:
            return None
        finally:
            response.close()
        return answer if response.status == HTTPStatus.OK else None

    def _headers(self, request: ProxyRequest) -> dict[str, str]:
        theirs = {n: request.headers[n] for n in ("authorization",) if n in request.headers}
        return {"content-type": "application/json", "via": f"1.1 {self._services.name}", **theirs}

    def _limits(self) -> Limits:
        connect = min(self._services.config.connect_timeout_seconds, TOKENIZE_SECONDS)
        return Limits(connect, TOKENIZE_SECONDS, TOKENIZE_SECONDS)


async def _content(value: payload.Value | None) -> bytes:
    """Return a value's JSON; b"" if there is none, or too much."""
    if value is None:
        return b""
    if isinstance(value, Span):
        pieces = value.part(0, min(len(value), MAX_BYTES + 1)).pieces()
        content = b"".join([piece async for piece in pieces])
    else:
        content = bytes(value)
    return content if len(content) <= MAX_BYTES else b""


async def _has_media(messages: bytes) -> bool:
    """Look for media, a piece in each turn of the event loop."""
    for start in range(0, len(messages), PIECE_BYTES):
        piece = messages[start : start + PIECE_BYTES + _LONGEST_END]
        if any(end in piece for end in _MEDIA):
            return True
        if len(messages) > PIECE_BYTES:
            await asyncio.sleep(0)
    return False
