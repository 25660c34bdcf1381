"""Holders: which ranks of a peer's instance have what this rank will ask for. Pure."""

from __future__ import annotations

import msgspec

from p2p_engine.errors import P2pError
from p2p_engine.memory.plan import counterpart, idle_sources, sources_of, unclaimed
from p2p_engine.wire.messages import CacheSpec, TransferKey


def givers(mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError) -> list[int]:
    """The ranks there from which this rank gets something of a key; `theirs` is what the peer's
    directory has answered."""
    if not isinstance(theirs, CacheSpec) or mine is None:
        return []
    group = mine.group(key.group)
    other = counterpart(group, theirs)
    return sources_of(other, group, group.rank) if other is not None else []


def keepers(
    mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError
) -> list[tuple[TransferKey, int]]:
    """What is held there for nobody, and which rank holds it, as far as this rank minds it.

    The first group that this rank has minds those that it has not.
    """
    if not isinstance(theirs, CacheSpec) or mine is None:
        return []
    group = mine.group(key.group)
    other = counterpart(group, theirs)
    idle = idle_sources(other, group, group.rank) if other is not None else []
    found = [(key, rank) for rank in idle]
    own = (item.number for item in mine.groups if item.layers != ())
    if group.number == next(own, None):
        for number, rank in unclaimed(theirs, mine):
            found.append((msgspec.structs.replace(key, group=number), rank))
    return found
