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
from proxy.http.origins import origin_of
from proxy.http.turns import Turns

if TYPE_CHECKING:
    from proxy.http.certificate import Certificate
    from proxy.http.house import ClientHouse
    from proxy.http.tls import TlsGuest

logger = logging.getLogger(__name__)

AT_ONCE = 4  # connections that are accepted before other work has its turn; each takes 0.1 ms
ENDS_AT_ONCE = 32  # connections that waited for too long: to close one takes some 0.1 ms
LOOK_SECONDS = 0.1  # between looks for who has waited for too long
PAUSE_SECONDS = 1.0  # after the system gave no descriptor
# Asked of the kernel, which takes twice as much for what a client has not taken. It would else let
# that grow to 4 MiB for each, and by thousands of clients that read nothing to its limit for TCP.
UNSENT_BYTES = 128 << 10


class ClientDoor:
    """Accepts connections on the sockets of a server; it is closed as that server would be.

    One that has spoken is let in, one in each round of the loop, or a few if rounds are long: who
    is inside already waits for no crowd at the door. Origins take turns, so a crowd delays nobody
    from elsewhere. Of one origin the newest is first: in a crowd that asks for more than the proxy
    can do, all would otherwise wait for the longest.
    """

    def __init__(
        self,
        house: ClientHouse,
        server: asyncio.AbstractServer,
        options: dict[str, Any],
        certificate: Certificate | None,
    ) -> None:
        """`options` are what uvicorn gives a protocol."""
        self._house = house
        self._options = options
        self._certificate = certificate
        self._loop = asyncio.get_running_loop()
        # By how long each may wait: until when, the earliest first.
        self._silent: dict[float, dict[Caller, float]] = {}
        self._spoken: dict[Caller, float] = {}
        self._turns = Turns()
        self._entering: dict[asyncio.Task[None], Caller] = {}
        listeners = cast("asyncio.Server", server).sockets
        self.sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in listeners]
        server.close()
        for listener in self.sockets:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
            self._listen(listener)
        self._looking: asyncio.Handle = self._loop.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Accept nobody else, and close what is not let in; idempotent."""
        if not self.sockets:
            return
        self._looking.cancel()
        while self.sockets:
            listener = self.sockets.pop()
            self._loop.remove_reader(listener.fileno())
            listener.close()
        for line in (*self._silent.values(), self._spoken):
            for caller in list(line):
                self._forget(caller)
        for task, caller in self._entering.items():
            task.cancel()
            if not caller.is_let_in:  # a task that has not begun never runs, nor what ends it
                self._forget(caller)

    async def wait_closed(self) -> None:
        """Return: `close` has done everything."""

    def _listen(self, listener: socket.socket) -> None:
        if listener in self.sockets:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._listen, listener)
                return
            connection.setblocking(False)
            origin, _ = origin_of(str(address[0]) if address else "")
            silence, turns = self._house.silence, self._turns
            self._greet(Caller(connection, origin, self._loop, silence, turns, self._hear))

    def _greet(self, caller: Caller) -> None:
        self._house.silence.add(caller.connection.fileno(), caller)
        seconds = self._house.enter(caller)
        # It may be that there is no room even to tell it so.
        if caller.connection.fileno() >= 0:
            caller.wait_in(self._silent.setdefault(seconds, {}), seconds)

    def _hear(self, caller: Caller) -> None:
        if not caller.look():
            self._forget(caller)
            return
        self._house.silence.remove(caller.connection.fileno(), caller)
        caller.is_silent = False
        if self._certificate is None:
            self._house.note_spoken(caller)
        caller.wait_in(self._spoken, self._house.rules.head_seconds)
        self._turns.ask(caller.origin, caller, partial(self._let_in, caller))

    def _let_in(self, caller: Caller) -> None:
        until = self._spoken.pop(caller)
        task = self._loop.create_task(self._connect(caller, until))
        self._entering[task] = caller
        task.add_done_callback(self._entering.pop)

    async def _connect(self, caller: Caller, until: float) -> None:
        try:
            if caller.connection.fileno() < 0:  # dropped, since its turn came
                return
            _, protocol = await self._loop.connect_accepted_socket(
                partial(self._open, caller, until), caller.connection
            )
            if self._certificate is not None:
                await cast("TlsGuest", protocol).complete()
        except OSError as error:
            logger.debug("no connection of HTTP: %s", error)
        finally:
            self._house.leave(caller)

    def _open(self, caller: Caller, until: float) -> asyncio.BaseProtocol:
        caller.is_let_in = True
        guest = self._house.open_door(caller=caller, **self._options)
        if self._certificate is None:
            return guest
        from proxy.http.tls import TlsGuest  # not for Python 3.10, which has no certificate either

        seconds = max(LOOK_SECONDS, until - self._loop.time())
        context = self._certificate.context
        tls = TlsGuest(context, guest, seconds, self._turns, caller.origin)
        caller.abort = tls.abort
        return tls

    def _look(self) -> None:
        for _ in range(ENDS_AT_ONCE):
            if not self._end_one(self._loop.time()):
                self._looking = self._loop.call_later(LOOK_SECONDS, self._look)
                return
        self._looking = self._loop.call_soon(self._look)

    def _end_one(self, now: float) -> bool:
        """Close one that has waited for too long; return whether there was one."""
        for silent in self._silent.values():
            if (caller := _late(silent, now)) is not None:
                if caller.look():  # it came while the process did not run
                    self._hear(caller)
                else:
                    self._house.close(caller, "idle")
                return True
        if (caller := _late(self._spoken, now)) is not None:
            self._house.close(caller, "slow")
            return True
        return False

    def _forget(self, caller: Caller) -> None:
        self._house.leave(caller)
        caller.drop()


def _late(line: dict[Caller, float], now: float) -> Caller | None:
    """Return the first in a line, if its time is over."""
    first = next(iter(line), None)
    return first if first is not None and now >= line[first] else None


class DoorServer(uvicorn.Server):
    """uvicorn's server, whose clients come in by a door."""

    def __init__(
        self, config: uvicorn.Config, house: ClientHouse, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self._house = house
        self._certificate = certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, then take its place at the sockets."""
        await super().startup(sockets)
        self._house.silence.open()
        options = {
            "config": self.config,
            "server_state": self.server_state,
            "app_state": self.lifespan.state,
        }
        doors = [ClientDoor(self._house, each, options, self._certificate) for each in self.servers]
        self.servers = cast("list[asyncio.base_events.Server]", doors)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does."""
        await super().shutdown(sockets)
        self._house.silence.close()
