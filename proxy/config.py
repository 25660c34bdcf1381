"""ProxyConfig: every setting of the proxy, checked once; nothing here reads the environment.

The names of routing policies are checked by the router, which has them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from p2p_engine.errors import ConfigError
from proxy.addresses import is_address, parse_static

SEQUENTIAL = "sequential"
CONCURRENT = "concurrent"
DISPATCHES = (SEQUENTIAL, CONCURRENT)
# Where 0 means that it is not used.
MAY_BE_ZERO = ("bypass_tokens", "max_queued", "max_retries")


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Where to listen, how long each stage may take, and how much is accepted.

    Port 0 asks the system for a free one; `/status` tells the registration address in use.
    """

    host: str = "0.0.0.0"
    port: int = 10001
    registration_host: str = "0.0.0.0"
    registration_port: int = 30001

    # Other proxies: the registration address of each is told of every heartbeat that comes here.
    peers: str = ""
    # Instances that send no heartbeats, as HTTP_ADDRESS or HTTP_ADDRESS@KV_ADDRESS.
    prefill: str = ""
    decode: str = ""
    both: str = ""
    # Host names and networks from which instances may come; empty: any.
    allowed_addresses: str = ""
    # The fleet's key: only who has it registers, and heartbeats are encrypted; empty: anybody does.
    key_file: str = ""
    # A file with the key for adding and removing instances; empty: nobody can.
    admin_key_file: str = ""
    drain_timeout_seconds: float = 300.0
    max_instances: int = 256
    # An instance that beats every 3 s is expired 10 s after its last beat.
    missed_beats: int = 3
    probe_interval_seconds: float = 2.0
    probe_timeout_seconds: float = 5.0

    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    # A prompt of which a decode instance must compute fewer tokens than this needs no prefill.
    bypass_tokens: int = 0
    # What the proxy remembers of prompts, in blocks of 256 bytes; about 100 bytes of memory each.
    max_prefix_blocks: int = 250_000

    # What is in progress at a time: legs of one role at one instance, and requests in all. What
    # comes on top waits, so many at most and so long.
    max_in_flight_per_instance: int = 1024
    max_in_flight: int = 4096
    max_queued: int = 1024
    queue_timeout_seconds: float = 60.0
    # How many other pairs are tried when one fails before the client was told anything.
    max_retries: int = 2
    # An instance that failed so many legs of a role in a row gets none for a while, then one.
    breaker_failures: int = 5
    breaker_seconds: float = 30.0

    # Prefill first, then decode; or both at once, decode's answer held back until prefill is done.
    dispatch: str = SEQUENTIAL
    max_body_bytes: int = 64 << 20
    # The client sends its request within this time, and takes each piece of the answer within it.
    client_timeout_seconds: float = 120.0
    connect_timeout_seconds: float = 5.0
    prefill_timeout_seconds: float = 600.0
    # Decode: the first byte of a stream, the silence between two of its pieces, and the whole
    # generation of an answer that is not a stream.
    first_byte_timeout_seconds: float = 600.0
    gap_timeout_seconds: float = 120.0
    response_timeout_seconds: float = 3600.0
    # How long requests in progress may still take after the proxy was told to stop.
    shutdown_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: names the key, the value and what is allowed.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("port"):
                _require(field.name, value, 0 <= value <= 65535, "0 to 65535")
            elif field.name in MAY_BE_ZERO:
                _require(field.name, value, value >= 0, "0 or more")
            elif isinstance(value, (int, float)):
                _require(field.name, value, 0 < value < float("inf"), "a number above 0")
        for key in ("prefill", "decode", "both"):
            parse_static(getattr(self, key))
        for peer in self.peer_addresses:
            _require("peers", peer, is_address(peer), "host:port, separated by commas")
        _require("dispatch", self.dispatch, self.dispatch in DISPATCHES, ", ".join(DISPATCHES))

    @property
    def peer_addresses(self) -> list[str]:
        """The registration addresses of the other proxies."""
        return [peer.strip() for peer in self.peers.split(",") if peer.strip()]


def _require(key: str, value: object, is_met: bool, allowed: str) -> None:
    if not is_met:
        raise ConfigError(f"{key} is {value!r}; allowed: {allowed}")
