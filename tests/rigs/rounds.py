"""Rounds of the event loop: what happens in the same one holds others up for as long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest


@asynccontextmanager
async def rounds_of(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> AsyncIterator[list[int]]:
    """In which round of the loop each call of a method was."""
    loop, called, own = asyncio.get_running_loop(), list[int](), getattr(owner, name)
    num_rounds, is_over = 0, False

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        if not is_over:
            loop.call_soon(count)

    def noted(*arguments: Any, **options: Any) -> Any:
        called.append(num_rounds)
        return own(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)
    count()
    try:
        yield called
    finally:
        is_over = True
        monkeypatch.setattr(owner, name, own)
