"""Link: one dialled peer, and the addresses of peers. links.py explains the states."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError, PeerUnreachable
from p2p_engine.transports.base import Channel, Endpoint, Transport
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import PROTOCOL_VERSION, CacheSpec


@dataclass(frozen=True)
class PeerAddress:
    """The address of a peer: an engine's own, or a directory's with the rank of an engine."""

    address: str
    rank: int | None = None

    def check(self) -> None:
        """Check that the address can be dialled.

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
    """An instance, by the address of its directory. It stands for the ranks that the plan names."""

    address: str

    def check(self) -> None:
        """Check that the address can be dialled.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        PeerAddress(self.address).check()

    def rank(self, rank: int) -> PeerAddress:
        """Return the address of one rank."""
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
    checksum: bool = False  # the peer wants a checksum of every chunk
    largest_landing: int = 0  # bytes that the peer could ever take at once; 0: any number
    lease: float = 60.0  # seconds that the peer keeps a hold or offer without RENEW
    connecting: bool = False
    connected: bool = False  # it has had a channel
    connect_at: float = 0.0  # not before
    connect_patience: float = 0.0  # how long the connecting may take
    channel: Channel | None = None
    transport: Transport | None = None
    error: P2pError | None = None
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    invited_at: float | None = None  # when the endpoints came: they allow one attempt
    asking: bool = False  # for new endpoints
    hello_at: float = 0.0  # when to ask again
    number: int = 0  # of the unanswered HELLO
    version: int = PROTOCOL_VERSION  # of the protocol, that the HELLO says
    untried: list[Transport] = field(default_factory=list)
    num_corrupted: Counter[str] = field(default_factory=Counter)  # by transport; twins share it
    is_losing: bool = False  # its broken channel is being closed
    heard_at: float = 0.0  # by the listening clock
    watched_since: float = 0.0  # by that clock: earlier silence does not count
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
        """Return the dialled address: the peer's, or its directory's until the peer's is known."""
        return self.address or self.target.address

    @property
    def lacks_channel(self) -> bool:
        """Whether a channel is wanted and there is none."""
        return self.data and self.channel is None

    @property
    def awaits_answer(self) -> bool:
        """Whether its deadline is in force."""
        return not self.ready or self.connecting
