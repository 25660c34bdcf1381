"""ClientDoor: where clients come in. One that says nothing costs a descriptor and little else.

uvicorn would make a transport, a parser and timers for each at once; while thousands come to say
nothing, others would wait behind them. It would also not count who is in a TLS handshake.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from proxy.http.caller import Caller

if TYPE_CHECKING:
    from proxy.http.house import ClientHouse, Guest

logger = logging.getLogger(__name__)

AT_ONCE = 64  # connections that are accepted before other work has its turn
LOOK_SECONDS = 0.1  # between looks for who has been silent for too long
PAUSE_SECONDS = 1.0  # after the system gave no descriptor


class ClientDoor:
    """Accepts connections on the sockets of a server; it is closed as that server would be."""

    def __init__(
        self, house: ClientHouse, server: asyncio.AbstractServer, options: dict[str, Any], ssl: Any
    ) -> None:
        """`options` are what uvicorn gives a protocol; `ssl` is the context for TLS, or None."""
        self._house = house
        self._options = options
        self._ssl = ssl
        self._loop = asyncio.get_running_loop()
        # By how long each may say nothing: until when, the earliest first.
        self._silent: dict[float, dict[Caller, float]] = {}
        self._entering: set[asyncio.Task[None]] = set()
        listeners = cast("asyncio.Server", server).sockets
        self.sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in listeners]
        server.close()
        for listener in self.sockets:
            listener.setblocking(False)
            self._listen(listener)
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Accept nobody else, and close what has said nothing; idempotent."""
        self._looking.cancel()
        while self.sockets:
            listener = self.sockets.pop()
            self._loop.remove_reader(listener.fileno())
            listener.close()
        for silent in self._silent.values():
            for caller in list(silent):
                self._forget(caller)
        for task in self._entering:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return: `close` has done everything."""

    def _listen(self, listener: socket.socket) -> None:
        if listener in self.sockets:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._listen, listener)
                return
            connection.setblocking(False)
            self._greet(Caller(connection, self._loop))

    def _greet(self, caller: Caller) -> None:
        # It may be that there is no room even to tell it so.
        self._loop.add_reader(caller.connection.fileno(), self._hear, caller)
        seconds = self._house.enter(caller)
        if caller.is_silent:
            caller.waiting = self._silent.setdefault(seconds, {})
            caller.waiting[caller] = self._loop.time() + seconds

    def _hear(self, caller: Caller) -> None:
        if not caller.look():
            self._forget(caller)
            return
        caller.stop_waiting()
        caller.is_entering = self._ssl is None
        task = self._loop.create_task(self._let_in(caller))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _let_in(self, caller: Caller) -> None:
        seconds = self._house.rules.head_seconds if self._ssl is not None else None
        try:
            await self._loop.connect_accepted_socket(
                partial(self._open, caller), caller.connection,
                ssl=self._ssl, ssl_handshake_timeout=seconds,
            )  # fmt: skip
        except OSError as error:
            logger.debug("no connection of HTTP: %s", error)
        finally:
            self._house.leave(caller)

    def _open(self, caller: Caller) -> Guest:
        return self._house.open_door(caller=caller, **self._options)

    def _look(self) -> None:
        now = self._loop.time()
        for silent in self._silent.values():
            while silent and now >= next(iter(silent.values())):
                caller = next(iter(silent))
                if caller.look():  # it came while the process did not run
                    self._hear(caller)
                else:
                    self._house.close(caller, "idle")
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look)

    def _forget(self, caller: Caller) -> None:
        self._house.leave(caller)
        caller.drop()


class DoorServer(uvicorn.Server):
    """uvicorn's server, whose clients come in by a door."""

    def __init__(self, config: uvicorn.Config, house: ClientHouse) -> None:
        super().__init__(config)
        self._house = house

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, then take its place at the sockets."""
        await super().startup(sockets)
        options = {
            "config": self.config,
            "server_state": self.server_state,
            "app_state": self.lifespan.state,
        }
        doors = [ClientDoor(self._house, each, options, self.config.ssl) for each in self.servers]
        self.servers = cast("list[asyncio.base_events.Server]", doors)
