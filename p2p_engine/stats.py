"""Counters of one engine; guarded by the engine's lock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError


@dataclass
class Counters:
    """What has happened since the engine was made."""

    sent_bytes: int = 0
    spilled_bytes: int = 0  # of what was held
    writing_seconds: float = 0.0  # from the start of each write to its end, added up
    denied: int = 0
    expired: int = 0
    corrupted: int = 0  # chunks that arrived with a wrong checksum
    wrong_messages: int = 0
    callback_errors: int = 0
    landed_bytes_by_place: Counter[str] = field(
        default_factory=lambda: Counter({"blocks": 0, "buffer": 0, "pool": 0})
    )
    outcomes: Counter[str] = field(default_factory=Counter)

    def count(self, direction: str, error: P2pError | None) -> None:
        """Count the end of a transfer under "sent ok", "received TransferTimeout" and so on."""
        self.outcomes[f"{direction} {'ok' if error is None else type(error).__name__}"] += 1
