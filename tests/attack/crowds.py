"""Crowds: connections that are many, idle, slow, or not read."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter

from tests.attack.play import Assault
from tests.attack.stage import HOST, AttackStage
from tests.processes import Child
from tests.rigs.certificates import client_hello
from tests.rigs.proxies import COMPLETIONS, STREAMED

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps(STREAMED).encode()
REQUEST = b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(BODY), BODY)
# Limits so short that an attack sees them pass.
LIMIT_SECONDS = 3
SHORT = dict.fromkeys(
    ("idle_timeout_seconds", "head_timeout_seconds", "client_timeout_seconds"), LIMIT_SECONDS
)
STAY_SECONDS = 5.0
LET_IN_SECONDS = 1.0  # for as many as fit into the house; less than SENDING_SECONDS there
FEW = 1024
REFUSED = (b"HTTP/1.1 503 Service Unavailable", b"closed")


def idle(stage: AttackStage) -> str:
    """Connections that say nothing come and stay."""
    crowd, count = stage.strangers(), stage.count(10_000)
    opened = crowd.ask("open", count)
    assert opened == count, f"{opened} of {count} could connect"
    time.sleep(STAY_SECONDS * stage.scale)
    stayed = crowd.ask("num_open")
    return f"{opened} connected, {stayed} stayed"


def idle_and_slow(stage: AttackStage) -> str:
    """Idle connections, and beside them some whose request comes a byte at a time."""
    crowd, slow = stage.strangers(), stage.strangers()
    count, num_slow = stage.count(10_000), stage.count(1000)
    slow.ask("open", num_slow // 2, HEAD)
    slow.ask("open", num_slow // 2, HEAD + b"Content-Length: 100000\r\n\r\n{")
    opened = crowd.ask("open", count)
    assert opened == count, f"{opened} of {count} could connect"
    _drip(slow, STAY_SECONDS * stage.scale)
    return f"{opened} idle and {num_slow} slow ones connected, {crowd.ask('num_open')} idle stayed"


def more_than_descriptors(stage: AttackStage) -> str:
    """Connections that say nothing come, more of them than the process may have descriptors."""
    crowd = stage.strangers()
    opened = crowd.ask("open", FEW + 100)
    time.sleep(STAY_SECONDS * stage.scale)
    return f"{opened} connected, {crowd.ask('num_open')} stayed"


def full_house(stage: AttackStage) -> str:
    """More connections than there is room for, each with a request that is not complete."""
    crowd, heard = stage.strangers(), Counter[bytes]()

    def is_full() -> bool:
        crowd.ask("open", FEW, HEAD + b"Content-Length: 100\r\n\r\n{")
        time.sleep(LET_IN_SECONDS)  # who is not in yet would make room
        newcomers = stage.strangers()
        newcomers.ask("open", 10, REQUEST)
        heard.update(newcomers.ask("hear", 10.0))
        return any(line in heard for line in REFUSED)

    stage.wait_until(is_full, "newcomers are refused")
    # A neighbour that leaves, or has no request at that moment, makes room for one.
    assert set(heard) <= {*REFUSED, b"HTTP/1.1 200 OK"}, heard
    return f"{FEW} tried, newcomers heard {_said(heard)}"


def late(stage: AttackStage) -> str:
    """Connections without a request, and with half of a head, stay as long as they may."""
    silent, half = stage.strangers(), stage.strangers()
    count = stage.count(1000)
    silent.ask("open", count)
    half.ask("open", count, HEAD)

    def are_closed() -> bool:
        half.ask("say", b"X")
        return not half.ask("num_open") and not silent.ask("num_open")

    began = time.monotonic()
    stage.wait_until(are_closed, "all are closed")
    took = time.monotonic() - began
    return f"{count} silent and {count} dripping ones closed by {LIMIT_SECONDS} s ({took:.1f} s)"


def slow_bodies(stage: AttackStage) -> str:
    """Bodies come a byte at a time."""
    crowd, count = stage.strangers(), stage.count(1000)
    crowd.ask("open", count, HEAD + b"Content-Length: 1000000\r\n\r\n{")
    _drip(crowd, LIMIT_SECONDS)
    heard = crowd.ask("hear", 10.0)
    assert set(heard) == {b"HTTP/1.1 408 Request Timeout"}, heard
    return f"{count} heard {_said(heard)}"


def crumbs(stage: AttackStage) -> str:
    """Bodies come in chunks of one byte; one of the same address asks for little beside them."""
    crowd, count = stage.strangers(), stage.count(3000)
    crowd.ask("open", count, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    kept, waited = http.client.HTTPConnection(HOST, stage.port, timeout=30), 0.0
    ends = time.monotonic() + STAY_SECONDS * stage.scale
    while time.monotonic() < ends:
        crowd.ask("say", b"1\r\nx\r\n")
        began = time.monotonic()
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        waited = max(waited, time.monotonic() - began)
    kept.close()
    return f"{count} sent them, /health of the same address took {1000 * waited:.0f} ms at most"


def hellos(stage: AttackStage) -> str:
    """Clients that are in already begin their TLS handshakes at the same moment."""
    crowd, count, words = stage.strangers(), stage.count(1000), client_hello()
    crowd.ask("open", count, words[:1])
    crowd.ask("say", words[1:])
    heard = crowd.ask("hear", 10.0)
    answered = sum(count for line, count in heard.items() if line.startswith(b"\x16"))
    assert answered == count, f"{answered} of {count} were answered"
    return f"{count} said hello, all answered"


def unread(stage: AttackStage) -> str:
    """Clients ask for long streams and do not read them."""
    stage.instances.ask("speak", "decode", 64 << 10, 1000)
    crowd, count = stage.strangers(), stage.count(1000)
    crowd.ask("open", count, REQUEST, 4096)

    def num_closed(limit: str) -> int:
        name = f'p2p_proxy_closed_connections_total{{limit="{limit}"}}'
        return round(stage.metrics().get(name, 0.0))

    stage.wait_until(
        lambda: num_closed("stalled") + num_closed("slow") >= count, "every stream is given up"
    )
    num_late = num_closed("slow")
    return (
        f"{count - num_late} streams given up after {LIMIT_SECONDS} s without a reader, "
        f"{num_late} closed before they were let in"
    )


def endless_head(stage: AttackStage) -> str:
    """Heads that never end come as quickly as they can."""
    crowd, count = stage.strangers(), stage.count(200)
    crowd.ask("open", count, HEAD)
    for _ in range(40):
        crowd.ask("say", b"X: " + b"y" * 8000 + b"\r\n")
    heard = crowd.ask("hear", 10.0)
    assert set(heard) <= {b"HTTP/1.1 431 Request Header Fields Too Large", b"closed"}, heard
    return f"{count} heard {_said(heard)}"


def ahead(stage: AttackStage) -> str:
    """Thousands of requests are sent ahead of the answer to the first, which does not come."""
    stage.instances.ask("behave", "decode", {"hang_after": 1})
    crowd, count = stage.strangers(), stage.count(100)
    crowd.ask("open", count, REQUEST)
    for _ in range(100):
        crowd.ask("say", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 400)
    return f"{count} sent 40,000 each, {crowd.ask('num_open')} may wait for the first answer"


def _drip(crowd: Child, seconds: float) -> None:
    """Say one byte on every connection, again and again."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        crowd.ask("say", b" ")
        time.sleep(0.1)


def _said(heard: dict[bytes, int]) -> str:
    return ", ".join(f"{line.decode()}: {count}" for line, count in sorted(heard.items()))


ASSAULTS = (
    Assault("10,000 idle connections", idle),
    Assault("10,000 idle and 1,000 slow connections", idle_and_slow),
    Assault("more clients than descriptors", more_than_descriptors, num_descriptors=FEW),
    Assault("idle and half-sent connections that stay", late, SHORT),
    Assault("1,000 bodies a byte at a time", slow_bodies, SHORT),
    Assault("1,000 streams that nobody reads", unread, SHORT),
    Assault("3,000 bodies in chunks of one byte", crumbs),
    Assault("1,000 TLS hellos at once", hellos, by_tls=True),
    Assault("200 endless heads", endless_head),
    Assault("requests sent far ahead", ahead),
    Assault("a full house", full_house, spares_others=False, num_descriptors=FEW),
)
