"""RefusedPeers: which instances this one's ranks refuse, and why, as one text for an operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

MAX_ADDRESSES = 3  # that are named of one reason


class RefusedPeers:
    """What each rank has told last."""

    def __init__(self) -> None:
        self._by_rank: dict[str, Mapping[str, str]] = {}

    def hear(self, news: Mapping[str, Mapping[str, str]]) -> str:
        """Take what some ranks tell, reasons by address; return a text, "" if nobody is refused."""
        self._by_rank |= news
        alike: dict[str, set[str]] = defaultdict(set)
        for refused in self._by_rank.values():
            for address, why in refused.items():
                alike[why].add(address)
        return "; ".join(f"refuses {_named(addresses)}: {why}" for why, addresses in alike.items())


def _named(addresses: set[str]) -> str:
    names, more = sorted(addresses), len(addresses) - MAX_ADDRESSES
    return ", ".join(names[:MAX_ADDRESSES]) + (f" and {more} more" if more > 0 else "")
