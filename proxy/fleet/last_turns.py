"""LastTurns: where the last turn of each session has left its KV, and of how many tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from p2p_engine.bounded import BoundedMap
from p2p_engine.wire.request_ids import ProxyId

MAX_SESSIONS = 1 << 14


@dataclass(frozen=True)
class TurnText:
    """The text of a prompt without its closing bracket or quote, with which a later turn begins:
    its length, and a hash of both its ends and of what else decides its KV. Only this process can
    compare it."""

    length: int
    ends: int


@dataclass
class LastTurn:
    """A turn: its transfer, of how many tokens decode should have the KV, and how a prompt begins
    that goes on with it."""

    transfer: ProxyId
    num_tokens: int
    beginning: TurnText

    def answered(self, num_tokens: int) -> None:
        """Note that decode has given so many tokens; it has not computed the last one's KV."""
        self.num_tokens += max(0, num_tokens - 1)


class LastTurns:
    """The last transfer of each session; the sessions that were not heard of for longest are
    forgotten. What is remembered is a hint: instances compare what they are asked for."""

    def __init__(self) -> None:
        self._turns: BoundedMap[bytes, LastTurn] = BoundedMap(MAX_SESSIONS)

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, client: str, session: str, model: str | None) -> LastTurn | None:
        """Return the last turn of a client's session, if it has one."""
        return self._turns.get(_name(client, session, model)) if session else None

    def put(self, client: str, session: str, model: str | None, turn: LastTurn) -> None:
        """Remember a turn whose KV stays with the instance that decodes."""
        if session and turn.transfer.decode:
            self._turns.put(_name(client, session, model), turn)


def _name(client: str, session: str, model: str | None) -> bytes:
    """A session's name takes the same room whatever its client calls it. `client` is the name of
    its key, or ""."""
    text = f"{client}\0{model}\0{session}".encode(errors="replace")
    return hashlib.blake2b(text, digest_size=16).digest()
