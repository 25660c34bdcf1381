"""Discovery: receives heartbeats and feeds them to the registry.

Other frames are counted and dropped. With a key, only members of the fleet are heard, and other
proxies need the key, too.
"""

from __future__ import annotations

import asyncio
import logging
import select
from contextlib import ExitStack
from typing import TYPE_CHECKING

from p2p_engine.bounded import BoundedMap, RateLimitedWarnings
from p2p_engine.control.fleet_key import exposure, read_key_file, warn_if_exposed
from p2p_engine.control.reach import Reach
from p2p_engine.control.resolver import Resolver
from p2p_engine.control.sockets import Route, Sockets
from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import decode_heartbeat, encode_heartbeat
from proxy.fleet.registry import AddressTaken, RegistryFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Counter

    from p2p_engine.wire.messages import Heartbeat
    from proxy.config import ProxyConfig
    from proxy.fleet.instances import Instance
    from proxy.fleet.registry import Registry


logger = logging.getLogger(__name__)

NAME_SECONDS = 4.5  # to resolve the name of another proxy
REFRESH_SECONDS = 3.0  # between two look-ups of that name
TICK_SECONDS = 0.02  # between two checks of timeouts and of the connections' cost
REST_SECONDS = 1.0  # between two of them where nothing comes
MAX_WARNED = 64  # malformed heartbeats, of different senders or with other faults: all are logged

_OLD_FORM = (
    "an old-form heartbeat; those and authentication exclude each other. Run the proxy without "
    "key_file, or run the instance with this connector and the key"
)


class Discovery:
    """The registration port. Call `start` inside the event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        heartbeats: Counter,
        on_instance: Callable[[Instance], None],
        clock: Callable[[], float],
    ) -> None:
        """Read the key file, if one is configured; bind nothing yet.

        `heartbeats` counts received frames by their result.

        Raises:
            ConfigError: the key file cannot be used.
        """
        self._config = config
        self._registry = registry
        self._heartbeats = heartbeats
        self._on_instance = on_instance
        self._clock = clock
        self._secrets = read_key_file(config.key_file)
        self._warnings = RateLimitedWarnings(logger, clock)
        self._refusals: dict[str, str] = {}  # the last refusal, by proxy address
        # HTTP address and fault, as the log says
        self._malformed: BoundedMap[tuple[str, str], bool] = BoundedMap(MAX_WARNED)
        self._epoll: select.epoll | None = None
        self._sockets: Sockets | None = None
        self._names: Resolver | None = None
        self._reach: Reach | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_resting = False  # nothing has come since the last tick
        self.address = ""

    @property
    def is_running(self) -> bool:
        """Tell whether the port is bound and heartbeats are read."""
        return self._sockets is not None

    @property
    def exposure(self) -> str:
        """Return a warning if the port is reachable from other hosts without a key, else ""."""
        return exposure(self._config.registration_host, self._secrets)

    @property
    def is_authenticated(self) -> bool:
        """Tell whether only members of the fleet can register."""
        return bool(self._secrets)

    @property
    def refused_connections(self) -> int:
        """Count the connections that were closed: no proof of membership, or too many at a time."""
        return self._sockets.refused_connections if self._sockets is not None else 0

    @property
    def dropped_frames(self) -> int:
        """Count the messages that had too many frames or could not be sent."""
        return self._sockets.dropped_frames if self._sockets is not None else 0

    def start(self) -> None:
        """Bind the port and read from it until `close`.

        Raises:
            ConfigError: the port cannot be bound.
        """
        host, port = self._config.registration_host, self._config.registration_port
        warn_if_exposed(host, self._secrets)
        loop = asyncio.get_running_loop()
        self._names = Resolver(NAME_SECONDS, loop.call_soon_threadsafe, loop.time)
        self._reach = reach = Reach(
            self._names, REFRESH_SECONDS, loop.time, self._take, self._refused,
            lambda address, error: self._refused(address, str(error)),
        )  # fmt: skip
        self._epoll = select.epoll()
        try:
            self._sockets = reach.sockets = Sockets(
                host, range(port, port + 1), self._epoll, reach.hear, reach.refused, self._secrets,
                answers=False,
            )  # fmt: skip
        except BaseException:
            self._epoll.close()
            raise
        self.address = self._sockets.address
        loop.add_reader(self._epoll.fileno(), self._serve)
        self._timer = loop.call_later(TICK_SECONDS, self._tick)
        logger.info("registration address=%s authenticated=%s", self.address, self.is_authenticated)

    def close(self) -> None:
        """Stop reading and release the port; idempotent."""
        if self._sockets is not None and self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            if self._timer is not None:
                self._timer.cancel()
            if self._names is not None:
                self._names.close()
            self._sockets.close()
            self._epoll.close()
            self._sockets = None

    def _tick(self) -> None:
        """Report names that were not resolved in time, and close connections that cost too much."""
        if self._names is not None and self._reach is not None and self._sockets is not None:
            loop = asyncio.get_running_loop()
            now = loop.time()
            at = now + TICK_SECONDS
            try:
                with ExitStack() as ticks:  # one that raises holds up no other
                    for part in (self._sockets, self._reach, self._names):
                        ticks.callback(part.tick, now)
                if self._is_resting:
                    at = max(at, min(self._names.due_at(), now + REST_SECONDS))
                    self._sockets.watch_intakes()
                self._is_resting = True
            finally:
                self._timer = loop.call_at(at, self._tick)

    def _end_rest(self) -> None:
        """Tick soon: something has come."""
        self._is_resting = False
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer.when() > loop.time() + TICK_SECONDS:
            self._timer.cancel()
            self._timer = loop.call_later(TICK_SECONDS, self._tick)

    def _serve(self) -> None:
        """Read pending messages, but yield to requests during a flood."""
        if self._sockets is None or self._epoll is None:
            return
        self._end_rest()
        for fd, _ in self._epoll.poll(0):
            if fd in self._sockets:
                self._sockets.receive(fd)
        self._sockets.receive_more()
        if self._sockets.has_more:
            asyncio.get_running_loop().call_soon(self._serve)

    def _take(self, route: Route, frame: bytes) -> None:
        """Handle one message and count its result."""
        if route.address:
            return  # an answer of another proxy; there is nothing to do
        try:
            result = self._observe(frame)
        except Exception:
            logger.exception("a heartbeat could not be handled; discovery continues")
            result = "error"
        self._heartbeats.labels(result).inc()

    def _observe(self, frame: bytes) -> str:
        sender = ""
        try:
            beat = decode_heartbeat(frame)
            sender = beat.http_address
            if self._secrets and beat.protocol is None:
                self._warnings.warn("%r refused: %s", beat.http_address, _OLD_FORM)
                return "old_form"
            instance, is_new = self._registry.observe(beat, self._clock())
        except AddressTaken as error:
            self._warnings.warn("heartbeat refused: %s", error)
            return "address_taken"
        except RemoteProtocolError as error:
            self._warn_once(sender, str(error))
            return "malformed"
        except RegistryFull as error:
            self._warnings.warn("heartbeat refused: %s", error)
            return "registry_full"
        if is_new:
            self._greet(instance)
        self._relay(beat)
        return "accepted"

    def _warn_once(self, sender: str, fault: str) -> None:
        """Log a malformed heartbeat, once for each sender and fault. Anybody may send them: after
        so many, one in ten seconds is logged, and the oldest is forgotten for it."""
        text, values = "heartbeat refused: http=%r: %s", (sender, fault)
        if values in self._malformed:
            return
        if len(self._malformed) < MAX_WARNED:
            logger.warning(text, *values)
        elif not self._warnings.warn(text, *values):
            return
        self._malformed.put(values, True)

    def _relay(self, beat: Heartbeat) -> None:
        """Forward a heartbeat to the other proxies, unless one of them forwarded it."""
        if beat.relayed or self._reach is None or self._sockets is None:
            return
        beat.relayed = True
        for peer in self._config.peer_addresses:
            self._reach.send(Route(peer), encode_heartbeat(beat))

    def _refused(self, address: str, reason: str) -> None:
        """Log that another proxy refused us or that its name does not resolve, once per reason.

        The next heartbeat dials it again.
        """
        if self._refusals.get(address) != reason:
            logger.error("heartbeats are not passed on: proxy %s: %s", address, reason)
        self._refusals[address] = reason

    def _greet(self, instance: Instance) -> None:
        identity = instance.identity
        logger.info(
            "instance joined http=%s zmq=%s protocol=%s epoch=%d model=%r",
            identity.name,
            identity.zmq_address,
            identity.protocol,
            identity.epoch,
            identity.model,
        )
        self._on_instance(instance)
