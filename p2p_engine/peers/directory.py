"""Directory: the one known address of an instance. It answers where each rank's engine listens, and
sends the instance's heartbeats to the proxy. It runs in vLLM's scheduler process."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from p2p_engine.config import EngineConfig
from p2p_engine.control.fleet_key import read_key_file, warn_if_exposed
from p2p_engine.control.plane import ControlPlane, PlaneListener
from p2p_engine.control.resolver import Answer
from p2p_engine.control.sockets import Route
from p2p_engine.errors import PeerUnreachable, RemoteProtocolError
from p2p_engine.peers.stash_notes import Recalling, StashNotes
from p2p_engine.wire.addresses import join_address
from p2p_engine.wire.identity import NO_FIELDS
from p2p_engine.wire.messages import (
    MAX_REASON,
    PROTOCOL_VERSION,
    CacheSpec,
    Heartbeat,
    Location,
    Lookup,
    Publisher,
    Recall,
    Stashed,
    TransferKey,
    decode,
    encode,
    encode_heartbeat,
    shorten,
)

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 3.0  # as in the old connector
# Each one comes earlier by up to this share, so that instances which start together drift apart.
HEARTBEAT_JITTER = 0.2
BEATS_UNTIL_TAKEN = 2  # that a proxy has not refused; it refuses one within less than two


@dataclass
class Refusal:
    """Why a proxy refused us, and how many heartbeats were sent to it since."""

    reason: str
    num_beats: int


@dataclass(frozen=True)
class RankAddress:
    """The address of one rank's engine, the description of its cache, and the packed fields whose
    digest that has."""

    rank: int
    address: str
    epoch: int
    spec: CacheSpec | None = None
    identity: bytes = NO_FIELDS


@dataclass(frozen=True)
class Server:
    """An instance's HTTP server. `rank` is its data-parallel rank, if several share one address."""

    address: Callable[[], str]  # "host:port", or "" while unknown; must not block
    rank: int | None = None


class Directory(PlaneListener):
    """Answers LOOKUP at host:kv_port and sends heartbeats; one thread.

    Before it has ranks, it only occupies its address: it answers no LOOKUP and sends no heartbeat.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: Sequence[RankAddress],
        *,
        kv_port: int,
        role: str,
        model: str = "",
        tp_size: int = 1,
        server: Server | None = None,
        events: Publisher | None = None,
        has_prefix_cache: bool = False,
    ) -> None:
        """Bind and start. `role` is "P", "D" or "PD": one heartbeat for each letter. Heartbeats
        start when the address of the HTTP `server` is known; by default it is
        `http_host:http_port`. `events`: where this process publishes its KV events. They also say
        whether vLLM `has_prefix_cache`.

        Raises:
            ConfigError: the port is taken, or the key file cannot be used.
        """
        self.wrong_messages = 0
        self.stashed = StashNotes()
        self._addresses: dict[int, str] = {}
        self._spec: CacheSpec | None = None
        self._identity = b""
        self._warnings: dict[str, str] = {}  # by subject
        self._epoch = secrets.randbits(62) | 1
        self._rng = random.Random(self._epoch)
        self._secrets = read_key_file(config.key_file)
        self._proxy_port = config.proxy_port
        self._proxies: dict[str, list[str]] = {host: [] for host in config.proxy_hosts}
        self._beat_at = 0.0
        self._refusals: dict[str, Refusal] = {}  # the last one of each proxy
        self._control = ControlPlane(
            config.host,
            range(kv_port, kv_port + 1),
            name="p2p-directory",
            listener=self,
            secrets=self._secrets,
            connect_seconds=config.connect_timeout_seconds,
        )
        self._server = server or Server(
            lambda: join_address(config.http_host or config.host, config.http_port)
        )
        self._heartbeats = [
            Heartbeat(
                letter,
                http_address="",
                zmq_address=self.address,
                protocol=PROTOCOL_VERSION,
                epoch=self._epoch,
                model=model,
                tp_size=tp_size,
                send_type=config.send_type.value,
                interval=HEARTBEAT_SECONDS,
                dp_rank=self._server.rank,
                events=events,
                has_prefix_cache=has_prefix_cache,
                accept_differences=shorten(", ".join(config.accept_differences)),
            )
            for letter in role
        ]
        warn_if_exposed(config.host, self._secrets)
        self.publish(ranks)
        self._control.start()

    def publish(self, ranks: Sequence[RankAddress]) -> None:
        """Answer for these ranks from now on, and register; from any thread."""
        self._spec, self._identity = next(((r.spec, r.identity) for r in ranks), (None, b""))
        for heartbeat in self._heartbeats:
            heartbeat.kv_bytes_per_token = _kv_bytes_per_token(self._spec)
        self._addresses = {item.rank: item.address for item in ranks}  # last: now it shows

    def warn(self, subject: str, text: str) -> None:
        """Tell the proxy that something is wrong here, and what; "" ends it. Each subject has one
        text. Not for two threads at a time."""
        self._warnings[subject] = text
        warning = _joined([each for _, each in sorted(self._warnings.items()) if each])
        for heartbeat in self._heartbeats:
            heartbeat.warning = warning

    def name_weights(self, name: str, *, have_changed: bool = False) -> None:
        """Tell the proxy soon what the weights here are called, and whether they may be others than
        at the start. Not for two threads at a time."""
        for heartbeat in self._heartbeats:
            heartbeat.weights, heartbeat.weights_changed = name, have_changed
        self._beat_at = 0.0
        self._control.stir()

    @property
    def address(self) -> str:
        """Return the address at which the directory answers, "host:port"."""
        return self._control.address

    @property
    def healthy(self) -> bool:
        """Whether the thread runs."""
        return self._control.alive

    def close(self, timeout: float = 2.0) -> None:
        """Tell the proxy that the instance is leaving, and stop; idempotent. Blocks for at most
        `timeout` seconds."""
        if self._control.alive:
            for heartbeat in self._heartbeats:
                heartbeat.leaving = True
            for known in self._proxies.values():
                self._send_heartbeats(known)
        if not self._control.close(timeout):
            logger.warning("directory %s did not stop within %g s", self.address, timeout)

    def __enter__(self) -> Directory:
        """Return the directory itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the directory."""
        self.close()

    def recall(self, address: str, key: TransferKey) -> Recalling:
        """Ask another instance's directory where its stash of a key can be cut; any thread, never
        blocks. An answer that is lost does not come."""
        asking = self.stashed.ask(address, key)
        self._control.send(Route(address), encode(Recall(self._epoch, 0, key)))
        return asking

    def on_frame(self, route: Route, frame: bytes) -> None:
        """Answer a question, or take an answer; any other message is dropped and counted."""
        try:
            message = decode(frame)
            if isinstance(message, Stashed) and route.address:
                self.stashed.answer(route.address, message.key, message.marks)
            elif isinstance(message, Recall):
                marks = self.stashed.find(message.key)
                answer = Stashed(self._epoch, message.source_epoch, message.key, marks)
                self._control.send(route, encode(answer))
            elif isinstance(message, Lookup):
                self._say_location(route, message)
            else:
                raise RemoteProtocolError(f"{type(message).__name__} sent to a directory")
        except RemoteProtocolError as error:
            self.wrong_messages += 1
            logger.debug("message dropped: %s", str(error))

    def _say_location(self, route: Route, message: Lookup) -> None:
        addresses = self._addresses
        if not addresses:
            return  # the peer repeats its LOOKUP
        address, num_ranks = addresses.get(message.rank, ""), len(addresses)
        instance = (num_ranks, self._spec, self._identity)
        answer = Location(self._epoch, message.source_epoch, message.rank, address, *instance)
        self._control.send(route, encode(answer))

    def on_tick(self, now: float) -> None:
        """Send the heartbeats that are due."""
        if now >= self._beat_at:
            early = HEARTBEAT_JITTER * self._rng.random()
            self._beat_at = now + HEARTBEAT_SECONDS * (1 - early)
            for host in self._proxies if self._addresses else ():
                self._control.resolve(host, partial(self._beat, host))

    def due_at(self, now: float) -> float:
        """Return when the next heartbeat is due."""
        return self._beat_at

    def on_refused(self, address: str, reason: str) -> None:
        """Note that a proxy refuses us; the next heartbeat dials it again."""
        known = self._refusals.get(address)
        level = logging.DEBUG if known and known.reason == reason else logging.ERROR
        logger.log(level, "not registered: proxy %s: %s", address, reason)
        self._refusals[address] = Refusal(reason, num_beats=0)

    def _note_taken(self, proxy: str) -> None:
        """Say so if a proxy that refused us did not refuse the last heartbeat."""
        refusal = self._refusals.get(proxy)
        if refusal is None:
            return
        refusal.num_beats += 1
        if refusal.num_beats > BEATS_UNTIL_TAKEN:
            del self._refusals[proxy]
            logger.warning("no longer refused: proxy %s", proxy)

    def _beat(self, host: str, answer: Answer) -> None:
        """Send heartbeats to every proxy behind a name; hang up on those that have left it."""
        named = join_address(host, self._proxy_port)
        if isinstance(answer, PeerUnreachable):
            self.on_refused(named, str(answer))
        else:
            before, now = self._proxies[host], _of_one_family(answer)
            if host not in now:
                self._note_taken(named)
            self._proxies[host] = [join_address(item, self._proxy_port) for item in now]
            for gone in set(before).difference(*self._proxies.values()):
                self._control.hang_up(gone)
                self._refusals.pop(gone, None)
        self._send_heartbeats(self._proxies[host])

    def _send_heartbeats(self, proxies: Sequence[str]) -> None:
        http_address = self._server.address() if proxies else ""
        for heartbeat in self._heartbeats if http_address else ():
            heartbeat.http_address = http_address
            for proxy in proxies:
                self._control.send(Route(proxy), encode_heartbeat(heartbeat))
        for proxy in proxies:
            self._note_taken(proxy)


def _of_one_family(addresses: Sequence[str]) -> list[str]:
    """Return the IPv4 addresses, or those of IPv6 if there are no others: a proxy that has both
    hears each heartbeat once."""
    return [item for item in addresses if (":" in item) == (":" in addresses[0])]


def _joined(texts: Sequence[str]) -> str:
    """Join warnings to what a message can carry: the longest are cut."""
    widths = [min(len(text), MAX_REASON) for text in texts]
    room = MAX_REASON - len("; ") * (len(texts) - 1)
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    pairs = zip(texts, widths, strict=True)
    cut = (text if len(text) <= width else f"{text[: width - 1]}…" for text, width in pairs)
    return shorten("; ".join(cut))


def _kv_bytes_per_token(spec: CacheSpec | None) -> int:
    """Return the KV bytes of one token over all ranks; 0 if one rank's blocks do not tell."""
    if spec is None or not spec.block_size:
        return 0
    return sum(spec.page_bytes) // spec.block_size * spec.num_ranks
