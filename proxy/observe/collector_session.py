"""CollectorSession: a session of `requests` in which a collector's answer has an end, in time and
in bytes, and in which only spans that it says to have taken have arrived."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.poolmanager import PoolManager

MAX_ANSWER_BYTES = 64 << 10
MAX_REASON = 200
CUT_AGAIN_SECONDS = 1.0  # what is cut may just be dialling another address
PROTOBUF = "application/x-protobuf"


class AnswerRefused(requests.RequestException):
    """The collector's answer is none by which spans have arrived."""


class CollectorSession(requests.Session):
    """For one thread at a time. `num_rejected`: how many spans the last answer did not take."""

    def __init__(self) -> None:
        super().__init__()
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._adapter = _Adapter()
        for scheme in ("http://", "https://"):
            self.mount(scheme, self._adapter)

    @property
    def num_rejected(self) -> int:
        """How many spans the last answer did not take."""
        return self._adapter.num_rejected

    @property
    def reason(self) -> str:
        """Why it did not take them."""
        return self._adapter.reason


class _Adapter(HTTPAdapter):
    """Reads an answer within its request's timeout, as it is, up to `MAX_ANSWER_BYTES`.

    A timeout of `requests` begins anew with each byte. So a thread, which owns nothing, shuts the
    socket down when time is over.
    """

    def __init__(self) -> None:
        self.num_rejected = 0
        self.reason = ""
        self._socket: socket.socket | None = None
        self._is_late = False
        super().__init__()

    def init_poolmanager(self, *args: Any, **settings: Any) -> None:
        """Note the connections that are used."""
        super().init_poolmanager(*args, **settings)
        self._note_connections_of(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **settings: Any) -> Any:
        """Note the connections that are used to a proxy before the collector."""
        manager = super().proxy_manager_for(*args, **settings)
        self._note_connections_of(manager)
        return manager

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        *args: Any,
        **settings: Any,
    ) -> requests.Response:
        """Send a request, and read its answer; blocks for `timeout` seconds.

        Raises:
            requests.RequestException: there is no answer, or it is none of a collector.
        """
        request.headers["Accept-Encoding"] = "identity"
        self.num_rejected, self._socket, self._is_late = 0, None, False
        is_over = threading.Event()
        watch = threading.Thread(
            target=self._cut_late, args=(is_over, timeout), name="span deadline", daemon=True
        )
        watch.start()
        try:
            response = super().send(request, True, timeout, *args, **settings)
            body = self._read(response)
        finally:
            is_over.set()
            watch.join()
        if response.status_code == HTTPStatus.OK:
            self._judge(response, body)
        elif response.status_code < HTTPStatus.BAD_REQUEST:
            raise AnswerRefused(f"the collector answered {response.status_code}")
        return response

    def _note_connections_of(self, manager: PoolManager) -> None:
        kinds: dict[str, tuple[type[HTTPConnectionPool], type[HTTPConnection]]] = {
            "http": (HTTPConnectionPool, HTTPConnection),
            "https": (HTTPSConnectionPool, HTTPSConnection),
        }
        manager.pool_classes_by_scheme = {
            scheme: type(pool.__name__, (pool,), {"ConnectionCls": _noted(kind, self._note)})
            for scheme, (pool, kind) in kinds.items()
        }

    def _note(self, connection: HTTPConnection) -> None:
        self._socket = connection.sock  # it forgets one that the answer's end will close

    def _cut_late(self, is_over: threading.Event, seconds: float) -> None:
        while not is_over.wait(seconds):
            self._is_late = True
            if (used := self._socket) is not None:
                with suppress(OSError):
                    socket.socket.shutdown(used, socket.SHUT_RDWR)
            seconds = CUT_AGAIN_SECONDS

    def _read(self, response: requests.Response) -> bytes:
        try:
            body: bytes = response.raw.read(MAX_ANSWER_BYTES + 1, decode_content=False)
        except HTTPError as error:
            raise AnswerRefused(f"the collector's answer broke off: {error}") from error
        finally:
            response.raw.close()
        if self._is_late:
            raise requests.ReadTimeout("the collector's answer did not end in time")
        if len(body) > MAX_ANSWER_BYTES:
            raise AnswerRefused(f"the collector answered more than {MAX_ANSWER_BYTES} bytes")
        response.raw = io.BytesIO(body)
        response.reason = response.reason[:MAX_REASON]
        return body

    def _judge(self, response: requests.Response, body: bytes) -> None:
        """Take an answer of 200 by its content, of which none means that all was taken."""
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            if body and kind != PROTOBUF:
                raise DecodeError
            answer = ExportTraceServiceResponse.FromString(body)
        except DecodeError as error:
            raise AnswerRefused("what answered is no collector of OpenTelemetry") from error
        self.num_rejected = answer.partial_success.rejected_spans
        self.reason = answer.partial_success.error_message[:MAX_REASON]


def _noted(
    kind: type[HTTPConnection], note: Callable[[HTTPConnection], None]
) -> type[HTTPConnection]:
    """Return a kind of connection that says when it is used."""

    class Noted(kind):  # type: ignore[misc, valid-type]
        def connect(self) -> None:
            super().connect()
            note(self)

        def request(self, *args: Any, **settings: Any) -> None:
            note(self)
            super().request(*args, **settings)

    return Noted
