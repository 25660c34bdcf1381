"""What an engine of the protocol's version before says, for a process that speaks as it does."""

from __future__ import annotations

from functools import partialmethod

from p2p_engine.peers import directory, sessions
from p2p_engine.peers.link import Link
from p2p_engine.wire.messages import OLDEST_VERSION


def speak_as_before() -> None:
    """Let every engine and directory of this process say the version before and refuse all others.
    It changes modules, so it is for a process of its own."""
    setattr(directory, "PROTOCOL_VERSION", OLDEST_VERSION)  # noqa: B010
    for name in ("PROTOCOL_VERSION", "OLDEST_VERSION"):
        setattr(sessions, name, OLDEST_VERSION)
    Link.__init__ = partialmethod(Link.__init__, version=OLDEST_VERSION)  # type: ignore[assignment, method-assign]
