"""NixlAgent: the few calls of NIXL that we need, and which of UCX's transports it may use.

We take the library's bindings, not its Python class: that one lets the progress thread poll without
a pause, which costs a whole core of an idle process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from p2p_engine.errors import ConfigError, TransportError

# What we register lasts as long as its agent, so nothing need be cached; the end is the end then.
ENGINE_CONFIG = "RCACHE_ENABLE=n"
# The progress thread sleeps until a descriptor wakes it; NIXL calls this a way round missed events.
WAKE_SECONDS = 0.05


@functools.cache
def load_nixl() -> Any:
    """Return NIXL's bindings. Call it before there are threads that map memory.

    The first agent of a process makes UCX write over the machine code of mmap, munmap and madvise.
    A thread that is in one of them at that moment may crash: one of ours did, in madvise. With
    UCX_MEM_MMAP_HOOK_MODE=none in the environment, UCX leaves them alone.

    Raises:
        ConfigError: NIXL cannot be loaded.
    """
    try:
        library = importlib.import_module("nixl")._bindings
    except (ImportError, AttributeError) as error:
        text = f"transports: 'nixl' needs NIXL (pip install 'p2p-kv-engine[nixl]'): {error}"
        raise ConfigError(text) from error
    with contextlib.suppress(TransportError):  # whoever needs the agent will be told
        NixlAgent(library, os.environ.get("UCX_TLS", "") or "tcp", progresses=False).close()
    return library


@contextlib.contextmanager
def _named(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TransportError(f"NIXL, {action}: {error}") from error


class NixlAgent:
    """One agent of NIXL with UCX as its backend. Closing it ends all that is on its way, from it
    and to it. Only `notifications` and `close` may be called in several threads."""

    def __init__(self, library: Any, ucx_tls: str, *, progresses: bool) -> None:
        """Make an agent with a name of its own. One that `progresses` has a thread, which sleeps
        while nothing comes; without it, only calls move bytes. Blocks.

        Raises:
            TransportError: there is no such device.
        """
        self._library = library
        self._lock = threading.Lock()  # guards the end of the agent
        config = library.nixlAgentConfig()
        config.useProgThread = progresses
        config.useListenThread = False
        config.pthrDelay = int(1e6 * WAKE_SECONDS)
        with _named(f"UCX_TLS={ucx_tls}"):
            self._agent: Any = library.nixlAgent(f"p2p-{secrets.token_hex(8)}", config)
            tls = "" if "," in ucx_tls else f",TLS={ucx_tls}"  # else it is in the environment
            options = {"engine_config": f"{ENGINE_CONFIG}{tls}"}
            self._backend = self._agent.createBackend("UCX", options)

    def register(self, address: int, nbytes: int) -> None:
        """Register host memory, which must stay mapped as long as the agent lives. RDMA pins it.

        Raises:
            TransportError: it is refused.
        """
        with _named(f"registering {nbytes} bytes"):
            kind = self._library.DRAM_SEG
            regions = self._library.nixlRegDList(kind, [(address, nbytes, 0, "")])
            self._agent.registerMem(regions, [self._backend])

    def metadata(self) -> bytes:
        """Return what a peer needs to write into our registered memory."""
        with _named("metadata"):
            return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Know a peer from now on, and return its name. A peer that we dialled has sent this: UCX
        trusts it.

        Raises:
            TransportError: it cannot be reached, or this is no metadata.
        """
        with _named("a peer's metadata"):
            name: bytes = self._agent.loadRemoteMD(metadata)
            self._agent.makeConnection(name.decode(), [self._backend])
            return name.decode()

    def forget(self, peer: str) -> None:
        """Remove a peer and its connection; nothing may be on its way to it."""
        with contextlib.suppress(TransportError), _named("removing a peer"):
            self._agent.invalidateRemoteMD(peer)

    def write(self, source: int, destination: int, nbytes: int, peer: str) -> int:
        """Start to write registered memory of ours into a peer's; returns a handle.

        Raises:
            TransportError: the connection has failed.
        """
        library, kind = self._library, self._library.DRAM_SEG
        with _named("a write"):
            ours = library.nixlXferDList(kind, [(source, nbytes, 0)])
            theirs = library.nixlXferDList(kind, [(destination, nbytes, 0)])
            handle = self._agent.createXferReq(
                library.NIXL_WRITE, ours, theirs, peer, b"", [self._backend]
            )
            self._agent.postXferReq(handle, b"")
            return int(handle)

    def is_complete(self, handle: int) -> bool:
        """Whether all bytes of a write lie in the peer's memory; moves bytes along.

        Raises:
            TransportError: the connection has failed.
        """
        with _named("a write"):
            state = self._agent.getXferStatus(handle)
            return bool(state == self._library.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Give a handle back, whatever became of its write."""
        with contextlib.suppress(TransportError), _named("a write's end"):
            self._agent.releaseXferReq(handle)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message that the peer gets after the bytes of all complete writes.

        Raises:
            TransportError: the connection has failed.
        """
        with _named("a notification"):
            self._agent.genNotif(peer, message, [self._backend])

    def notifications(self) -> list[bytes]:
        """Return the messages that have come since the last call; [] once the agent is closed."""
        with self._lock:
            if self._agent is None:
                return []
            with _named("notifications"):
                come = self._agent.getNotifs({}, [self._backend])
                return [message for messages in come.values() for message in messages]

    def close(self) -> list[bytes]:
        """End everything, and return the last messages; idempotent. Blocks until no byte moves."""
        last: list[bytes] = []
        with contextlib.suppress(TransportError):
            last = self.notifications()
        with self._lock:
            self._agent = self._backend = None
        return last
