"""Discovery: listens for heartbeats and feeds the registry. Whatever is no heartbeat is counted
and dropped."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.messages import MAX_FRAME_BYTES, decode_heartbeat
from proxy.registry import RegistryFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.config import ProxyConfig
    from proxy.instances import Instance
    from proxy.metrics import Metrics
    from proxy.registry import Registry

logger = logging.getLogger(__name__)

# In front of a heartbeat that comes from another proxy.
_RELAYED = b"relayed"


class Discovery:
    """The registration port. Bind it inside the event loop that runs it."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        metrics: Metrics,
        on_instance: Callable[[Instance], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._on_instance = on_instance
        self._clock = clock
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._peers: list[zmq.asyncio.Socket] = []
        self.address = ""

    @property
    def is_running(self) -> bool:
        """Tell whether heartbeats are being read."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Bind the port and read from it until closed.

        Raises:
            zmq.ZMQError: the port cannot be bound.
        """
        self._context = zmq.asyncio.Context(io_threads=1)
        socket = _router(self._context)
        host, port = self._config.registration_host, self._config.registration_port
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._peers = [_dealer(self._context, peer) for peer in self._config.peer_addresses]
        self._task = asyncio.ensure_future(self._run(socket))
        logger.info("registration address=%s", self.address)

    async def close(self) -> None:
        """Stop reading and give the port back; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _run(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            result = self._take(frames)
            self._metrics.heartbeats.labels(result).inc()
            if result == "accepted":
                await self._relay(frames)
            # A waiting message is received without a turn of the loop: a flood would starve it.
            await asyncio.sleep(0)

    def _take(self, frames: list[bytes]) -> str:
        """Handle one message and return what became of it."""
        if len(frames) != 2 and frames[1:-1] != [_RELAYED]:
            return "not_two_frames"
        try:
            beat = decode_heartbeat(frames[-1])
            instance, is_new = self._registry.observe(beat, self._clock())
        except RemoteProtocolError as error:
            logger.debug("heartbeat refused: %s", error)
            return "malformed"
        except RegistryFull as error:
            logger.debug("heartbeat refused: %s", error)
            return "registry_full"
        if is_new:
            self._greet(instance)
        return "accepted"

    async def _relay(self, frames: list[bytes]) -> None:
        """Pass a heartbeat on to the other proxies, unless it comes from one."""
        if len(frames) > 2:
            return
        for peer in self._peers:
            with suppress(zmq.Again):  # it is away: it will learn from a later beat
                await peer.send_multipart([_RELAYED, frames[-1]], zmq.NOBLOCK)

    def _greet(self, instance: Instance) -> None:
        identity = instance.identity
        logger.info(
            "instance joined http=%s zmq=%s protocol=%s epoch=%d model=%r",
            identity.http_address,
            identity.zmq_address,
            identity.protocol,
            identity.epoch,
            identity.model,
        )
        self._on_instance(instance)


def _dealer(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(f"tcp://{address}")
    return socket


def _router(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # An instance that comes back with its old identity takes over from its dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket
