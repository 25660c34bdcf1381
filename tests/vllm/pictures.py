"""Chats with pictures, which are made of a seed."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from typing import Any, NamedTuple

from tests.compat.workload import Question
from tests.vllm.other_models import PATCH

CHAT = "/v1/chat/completions"
NUM_ANSWERED = 24


class Picture(NamedTuple):
    """An image of random squares, one token for four of them."""

    seed: str
    across: int = 8
    down: int = 8

    @property
    def num_tokens(self) -> int:
        return self.across * self.down

    @property
    def png(self) -> bytes:
        source, rows = random.Random(self.seed), []
        for _ in range(2 * self.down):
            squares = (source.randbytes(3) * PATCH for _ in range(2 * self.across))
            rows += [b"\0" + b"".join(squares)] * PATCH
        size = 2 * PATCH * self.across, 2 * PATCH * self.down
        header = struct.pack(">2I5B", *size, 8, 2, 0, 0, 0)
        chunks = {b"IHDR": header, b"IDAT": zlib.compress(b"".join(rows)), b"IEND": b""}
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks.items()
        )

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode()

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{self.base64}"


Part = str | Picture


def chat(*parts: Part, **more: Any) -> Question:
    return turns({"role": "user", "content": chat_parts(*parts)}, **more)


def turns(*messages: dict[str, Any], **more: Any) -> Question:
    body = {
        "model": "tiny", "messages": list(messages), "max_tokens": NUM_ANSWERED, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return Question(CHAT, {**body, **more})


def chat_parts(*parts: Part) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in parts
    ]  # fmt: skip


def words(seed: str, num_numbers: int = 20) -> str:
    """A text that nobody has asked before."""
    source = random.Random(seed)
    return " ".join(str(source.randrange(10**6)) for _ in range(num_numbers))
