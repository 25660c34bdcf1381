"""Link: one dialled peer, and how peers are addressed. The states are in links.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError, PeerUnreachable
from p2p_engine.transports.base import Channel, Endpoint, Transport
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import CacheSpec


@dataclass(frozen=True)
class PeerAddress:
    """Whom to reach: an engine, or one rank of the instance whose directory is at `address`."""

    address: str
    rank: int | None = None

    def check(self) -> None:
        """Check that it can be dialled.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        try:
            split_address(self.address)
        except ValueError as error:
            raise PeerUnreachable(f"peer {self}: {error}") from None

    def __str__(self) -> str:
        """Show the address as in log lines."""
        return self.address if self.rank is None else f"{self.address} rank {self.rank}"


@dataclass(frozen=True)
class InstanceAddress:
    """Those ranks of an instance that concern us, found by its directory."""

    address: str

    def check(self) -> None:
        """Check that it can be dialled.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        PeerAddress(self.address).check()

    def rank(self, rank: int) -> PeerAddress:
        """Return the address of one of them."""
        return PeerAddress(self.address, rank)

    def __str__(self) -> str:
        """Show the address as in log lines."""
        return self.address


class LinkState(enum.Enum):
    """See the docstring of links.py."""

    LOCATING = enum.auto()
    GREETING = enum.auto()
    READY = enum.auto()
    CLOSED = enum.auto()


@dataclass(eq=False)
class Link:
    """One dialled peer."""

    target: PeerAddress
    address: str
    state: LinkState
    deadline: float
    epoch: int = 0
    data: bool = False  # a channel is wanted
    spec: CacheSpec | None = None
    checksum: bool = False  # the peer wants one of every chunk
    largest_landing: int = 0  # bytes that the peer could ever take at once; 0: any number
    lease: float = 60.0  # how long the peer keeps what is not renewed
    connecting: bool = False
    connected: bool = False  # there has been a channel
    connect_at: float = 0.0  # not before
    channel: Channel | None = None
    transport: Transport | None = None
    error: P2pError | None = None
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    invited_at: float | None = None  # when the endpoints came; they are good for one attempt
    asking: bool = False  # for new ones
    hello_at: float = 0.0  # when to ask again
    number: int = 0  # of the HELLO that is not answered yet
    untried: list[Transport] = field(default_factory=list)
    is_losing: bool = False  # its broken channel is being closed
    heard_at: float = 0.0  # by the listening clock
    watched_since: float = 0.0  # by that clock: silence before it does not count
    is_resting: bool = False
    is_answered: bool = True  # the last PING
    is_cut: bool = False  # its connection has ended since the last PING
    resend_at: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether messages may be sent."""
        return self.state is LinkState.READY

    @property
    def contact(self) -> str:
        """The address that is dialled: the peer's, or its directory's until that is known."""
        return self.address or self.target.address

    @property
    def lacks_channel(self) -> bool:
        """Whether it is wanted for bytes, and cannot move them."""
        return self.data and self.channel is None

    @property
    def awaits_answer(self) -> bool:
        """Whether its deadline counts."""
        return not self.ready or self.connecting
