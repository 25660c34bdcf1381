"""`p2p-engine drain` before proxies that answer late, or not, or know other instances."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from p2p_engine.cli import drain as module
from p2p_engine.cli.drain import run_drain
from p2p_engine.errors import ConfigError

ADDRESS = "10.0.0.3:8200"


class ProxyDouble(ThreadingHTTPServer):
    """Shows instances, and drains them at once when told to."""

    def __init__(self) -> None:
        """Listen, and know no instance."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.states: dict[str, str] = {}
        self.orders: list[str] = []
        self.late_at: set[int] = set()  # which of its /status answers come when all is over
        self.num_asked = 0
        self.is_over = threading.Event()

    def shown(self) -> list[dict[str, Any]]:
        """Return the instances, as /status has them."""
        return [
            {"name": name, "http_address": name.partition("#")[0], "state": state, "in_flight": {}}
            for name, state in self.states.items()
        ]

    def handle_error(self, *_: Any) -> None:
        """Say nothing: who asked may have left."""


class _Handler(BaseHTTPRequestHandler):
    server: ProxyDouble

    def do_GET(self) -> None:
        self.server.num_asked += 1
        if self.server.num_asked in self.server.late_at:
            self.server.is_over.wait(30)
        self._answer({"instances": self.server.shown()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.orders.append(body["instance"])
        self.server.states[body["instance"]] = "drained"
        self._answer({})

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[ProxyDouble]:
    """A proxy that serves."""
    server = ProxyDouble()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def drain(names: str, instance: str = ADDRESS, seconds: float = 30.0) -> tuple[int, str]:
    """Return the exit code and what was said."""
    said = io.StringIO()
    return run_drain(
        names, instance, "key", seconds, Console(file=said, width=200)
    ), said.getvalue()


def at(proxy: ProxyDouble) -> str:
    """Return its address."""
    return f"127.0.0.1:{proxy.server_port}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)


def test_a_late_answer_is_no_answer(proxy: ProxyDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    proxy.states, proxy.late_at = {ADDRESS: "draining"}, set(range(1000))
    code, said = drain(at(proxy), seconds=0.1)
    assert code == 1
    assert said.startswith(f"{at(proxy)}: no answer in time")
    proxy.states, proxy.late_at = {ADDRESS: "ready"}, {proxy.num_asked + 1, proxy.num_asked + 3}
    assert drain(at(proxy)) == (0, f"{at(proxy)}: drained\n")
    assert proxy.orders == [ADDRESS]


@pytest.mark.parametrize("given", ["fd00::3:8200", "[fd00::3]:8200"])
def test_an_address_of_ipv6_needs_no_brackets(proxy: ProxyDouble, given: str) -> None:
    proxy.states = {"[fd00::3]:8200": "ready", "[fd00::3]:8201": "ready"}
    assert drain(at(proxy), given)[0] == 0
    assert proxy.states == {"[fd00::3]:8200": "drained", "[fd00::3]:8201": "ready"}


def test_one_rank_is_drained_alone(proxy: ProxyDouble) -> None:
    proxy.states = {f"{ADDRESS}#0": "ready", f"{ADDRESS}#1": "ready"}
    assert drain(at(proxy), f"{ADDRESS}#0")[0] == 0
    assert proxy.orders == [f"{ADDRESS}#0"]
    assert drain(at(proxy))[0] == 0
    assert proxy.orders == [f"{ADDRESS}#0", f"{ADDRESS}#1"]


def test_an_instance_that_no_proxy_knows_is_not_drained(proxy: ProxyDouble) -> None:
    assert drain(at(proxy)) == (1, f"{at(proxy)}: does not know it\n")


def test_a_proxy_that_refuses_connections_may_have_requests_in_progress(
    proxy: ProxyDouble, free_port: int
) -> None:
    proxy.states = {ADDRESS: "ready"}
    code, said = drain(f"{at(proxy)},127.0.0.1:{free_port}", seconds=0.1)
    assert code == 1
    assert f"{at(proxy)}: drained" in said
    assert f"127.0.0.1:{free_port}: Connection refused" in said


def test_the_names_are_looked_up_again(
    proxy: ProxyDouble, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.states = {ADDRESS: "ready"}
    answers = [
        socket.gaierror(socket.EAI_AGAIN, "later"),
        [(0, 0, 0, "", ("127.0.0.1", proxy.server_port))],
        socket.gaierror(socket.EAI_AGAIN, "later"),
        [(0, 0, 0, "", ("127.0.0.2", proxy.server_port))],  # nobody is there
    ]

    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if host != "proxies":
            return real(host, *rest, **options)
        answer = answers.pop() if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert drain(f"proxies:{proxy.server_port}")[0] == 0


def test_who_drains_must_give_addresses(proxy: ProxyDouble) -> None:
    with pytest.raises(ConfigError, match="instance is '8200'"):
        drain(at(proxy), "8200")
    with pytest.raises(ConfigError, match="proxy is 'proxies'"):
        drain("proxies")
