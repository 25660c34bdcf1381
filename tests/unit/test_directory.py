"""The directory: answers about ranks, heartbeats to the proxy, and leave-taking."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from p2p_engine.config import EngineConfig
from p2p_engine.control import resolver
from p2p_engine.control.resolver import Answer
from p2p_engine.errors import ConfigError, PeerUnreachable
from p2p_engine.peers.directory import HEARTBEAT_SECONDS, Directory, RankAddress
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import (
    MAX_REASON,
    PROTOCOL_VERSION,
    Location,
    Lookup,
    Ping,
    Publisher,
    decode,
    decode_heartbeat,
    encode,
)
from tests.support import eventually

RANKS = [RankAddress(0, "10.0.0.1:1", 5), RankAddress(1, "10.0.0.2:2", 6)]
pytestmark = pytest.mark.usefixtures("no_leaks")


class RegistrationPort:
    """The registration port of a proxy."""

    def __init__(self, host: str = "127.0.0.1", port: int | str = "*") -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://{host}:{port}")
        self.port = split_address(
            self._router.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        )[1]
        self._lost = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def frame(self) -> bytes:
        assert self._router.poll(10_000), "no heartbeat"
        frame: bytes = self._router.recv_multipart()[-1]
        return frame

    def hear(self) -> dict[str, Any]:
        beat: dict[str, Any] = msgpack.unpackb(self.frame())
        return beat

    def lose(self) -> None:
        assert self._lost.poll(10_000), "no connection was closed"
        recv_monitor_message(self._lost)

    def close(self) -> None:
        self._router.disable_monitor()
        self._lost.close(0)
        self._router.close(0)
        self._context.term()


@pytest.fixture
def proxy() -> Iterator[RegistrationPort]:
    made = RegistrationPort()
    yield made
    made.close()


def ask(address: str, *frames: bytes) -> bytes:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{address}")
        for frame in frames:
            dealer.send(frame)
        assert dealer.poll(10_000), "no answer"
        return dealer.recv()


@pytest.mark.parametrize(
    ("rank", "address"), [(0, "10.0.0.1:1"), (1, "10.0.0.2:2"), (2, ""), (1 << 31, "")]
)
def test_ranks_are_found(rank: int, address: str) -> None:
    with Directory(EngineConfig(), RANKS, kv_port=0, role="D") as directory:
        answer = decode(ask(directory.address, encode(Lookup(3, 0, rank))))
    assert isinstance(answer, Location)
    assert (answer.destination_epoch, answer.rank, answer.address) == (3, rank, address)
    assert answer.num_ranks == 2


def test_the_fields_of_an_identity_come_with_the_answer() -> None:
    ranks = [RankAddress(0, "10.0.0.1:1", 1, identity=b"packed")]
    with Directory(EngineConfig(), ranks, kv_port=0, role="D") as directory:
        answer = decode(ask(directory.address, encode(Lookup(3, 0, 0))))
    assert isinstance(answer, Location)
    assert answer.identity == b"packed"


def test_noise_is_counted_and_survived() -> None:
    with Directory(EngineConfig(), RANKS, kv_port=0, role="D") as directory:
        ask(directory.address, b"noise", encode(Ping(1, 2)), b"", encode(Lookup(3, 0, 0)))
        eventually(lambda: directory.wrong_messages == 3)
        assert directory.healthy
    assert not directory.healthy


@pytest.mark.parametrize("role", ["P", "D", "PD"])
def test_heartbeats_and_leave(role: str, proxy: RegistrationPort) -> None:
    config = EngineConfig(proxy_ip="127.0.0.1", proxy_port=proxy.port, http_port=8000)
    events = Publisher(5557, 6557, "kv") if role == "P" else None
    directory = Directory(config, RANKS, kv_port=0, role=role, model="m", tp_size=2, events=events)
    beats = [proxy.hear() for _ in role]
    assert [beat["type"] for beat in beats] == list(role)
    for beat in beats:
        assert beat["http_address"] == "127.0.0.1:8000"
        assert beat["zmq_address"] == directory.address
        assert (beat["protocol"], beat["model"], beat["tp_size"]) == (PROTOCOL_VERSION, "m", 2)
        assert "leaving" not in beat
        assert beat.get("events") == (msgspec.to_builtins(events) if events else None)
    directory.close()
    directory.close()
    left: set[str] = set()
    while len(left) < len(role):
        beat = proxy.hear()
        left |= {beat["type"]} if beat.get("leaving") else set()


def test_each_subject_has_its_warning_and_a_heartbeat_carries_them_all(
    proxy: RegistrationPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest are cut, so that the proxy can read them."""
    monkeypatch.setattr("p2p_engine.peers.directory.HEARTBEAT_SECONDS", 0.02)
    config = EngineConfig(proxy_ip="127.0.0.1", proxy_port=proxy.port, http_port=8000)
    said = [
        ("weights", "unknown", "unknown"),
        ("peers", "p" * 9000, f"{'p' * 490}…; unknown"),
        ("transfers", "t" * 9000, f"{'p' * 243}…; {'t' * 244}…; unknown"),
        ("peers", "", f"{'t' * 490}…; unknown"),
        ("transfers", "", "unknown"),
        ("weights", "", ""),
    ]
    before = ""
    with Directory(config, RANKS, kv_port=0, role="D") as directory:
        for subject, text, expected in said:
            directory.warn(subject, text)
            while (told := decode_heartbeat(proxy.frame()).warning) != expected:
                assert told == before
            before = expected


def test_a_proxy_hears_soon_what_weights_are_called(
    proxy: RegistrationPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_engine.peers.directory.HEARTBEAT_SECONDS", 3600.0)
    config = EngineConfig(proxy_ip="127.0.0.1", proxy_port=proxy.port, http_port=8000)
    with Directory(config, RANKS, kv_port=0, role="PD") as directory:
        assert [decode_heartbeat(proxy.frame()).weights for _ in "PD"] == [""] * 2
        for name in ("checkpoint-0011", "step-42"):
            have_changed = name == "step-42"
            directory.name_weights(name, have_changed=have_changed)
            beats = [decode_heartbeat(proxy.frame()) for _ in "PD"]
            assert [(b.weights, b.weights_changed) for b in beats] == [(name, have_changed)] * 2


def test_heartbeats_say_which_differences_are_accepted(proxy: RegistrationPort) -> None:
    common = {"proxy_ip": "127.0.0.1", "proxy_port": proxy.port, "http_port": 8000}
    for names, told in ((["b", "a.c"], "a.c, b"), (["x" * 9000], "x" * MAX_REASON), ([], "")):
        config = EngineConfig.from_extra_config({**common, "accept_differences": names})
        with Directory(config, RANKS, kv_port=0, role="D") as directory:
            while (beat := decode_heartbeat(proxy.frame())).zmq_address != directory.address:
                pass
        assert beat.accept_differences == told


def test_every_proxy_is_told(proxy: RegistrationPort) -> None:
    """The second address is this machine too; nobody is at the third."""
    hosts = ["127.0.0.1", "localhost", "127.0.0.99"]
    config = EngineConfig(proxy_ip=hosts, proxy_port=proxy.port, http_port=8000)  # type: ignore[arg-type]
    with Directory(config, RANKS, kv_port=0, role="D") as directory:
        beats = [proxy.hear(), proxy.hear()]
        assert [beat["zmq_address"] for beat in beats] == [directory.address] * 2


def test_a_name_stands_for_every_proxy_behind_it(
    proxy: RegistrationPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name of a headless service, which changes as proxies come and go."""
    behind: list[Answer] = [("127.0.0.1", "::1")]
    monkeypatch.setattr(resolver, "look_up", lambda name: behind[-1])
    config = EngineConfig(proxy_ip="proxies", proxy_port=proxy.port, http_port=8000)
    with closing(RegistrationPort("127.0.0.2", proxy.port)) as second:
        directory = Directory(config, RANKS, kv_port=0, role="D")
        proxy.hear()
        behind.append(("127.0.0.1", "127.0.0.2"))
        second.hear()
        behind.append(("127.0.0.2",))
        proxy.lose()
        behind.append(PeerUnreachable("no answer"))
        second.hear()
        directory.close()
        while not second.hear().get("leaving"):
            pass


def test_it_says_so_when_a_proxy_that_refused_it_takes_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2p_engine.peers.directory.HEARTBEAT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        port = other.getsockname()[1]
        config = EngineConfig(proxy_ip="127.0.0.1", proxy_port=port, http_port=8000)
        with Directory(config, RANKS, kv_port=0, role="D"):

            def refuse() -> None:
                while f"not registered: proxy 127.0.0.1:{port}: " not in caplog.text:
                    other.accept()[0].close()

            pool.submit(refuse).result(20)
            other.close()
            with closing(RegistrationPort(port=port)) as proxy:
                assert proxy.hear()["http_address"] == "127.0.0.1:8000"
                eventually(lambda: f"no longer refused: proxy 127.0.0.1:{port}" in caplog.text)


def test_port_that_is_taken_is_named() -> None:
    with Directory(EngineConfig(), RANKS, kv_port=0, role="D") as directory:
        _, port = split_address(directory.address)
        with pytest.raises(ConfigError, match=str(port)):
            Directory(EngineConfig(), RANKS, kv_port=port, role="D")


def test_heartbeats_of_those_that_start_together_drift_apart() -> None:
    """Each comes in time, and no two at the same moment."""
    due, now = [], 1e9  # so far ahead that their own threads do not look
    for _ in range(4):
        with Directory(EngineConfig(), RANKS, kv_port=0, role="PD") as directory:
            directory.on_tick(now)
            due.append(directory.due_at(now) - now)
    assert len(set(due)) == len(due)
    assert all(0.8 * HEARTBEAT_SECONDS <= seconds <= HEARTBEAT_SECONDS for seconds in due)
