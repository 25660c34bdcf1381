"""ProxyConfig: every setting of the proxy, validated once; reads no environment variables.

The router validates the names of routing policies, because it knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from p2p_engine.errors import ConfigError
from proxy.addresses import is_address, is_url, parse_static

SEQUENTIAL = "sequential"
CONCURRENT = "concurrent"
DISPATCHES = (SEQUENTIAL, CONCURRENT)
# For these settings, 0 turns the feature off.
MAY_BE_ZERO = ("bypass_tokens", "max_queued", "max_retries")


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Where to listen, how long each stage may take, and how much is accepted.

    Port 0 lets the system choose a free port; `/status` shows the registration address in use.
    """

    host: str = "0.0.0.0"
    port: int = 10001
    registration_host: str = "0.0.0.0"
    registration_port: int = 30001

    # Registration addresses of other proxies. This proxy forwards every heartbeat to them.
    peers: str = ""
    # Instances that send no heartbeats, as HTTP_ADDRESS or HTTP_ADDRESS@KV_ADDRESS.
    prefill: str = ""
    decode: str = ""
    both: str = ""
    # Host names and networks from which instances may register; empty: any.
    allowed_addresses: str = ""
    # The fleet's key. With it, heartbeats are encrypted and only members register; empty: anyone
    # can.
    key_file: str = ""
    # File with the key for adding and removing instances; empty: nobody can.
    admin_key_file: str = ""
    # File with the keys of clients, and their limits; empty: anybody may send requests.
    client_keys_file: str = ""
    # File with the key that instances ask for (vLLM's --api-key); empty: the client's key passes,
    # unless it is one of this proxy.
    instance_key_file: str = ""
    # Files with the certificate and the key for TLS towards clients; empty: plain HTTP.
    tls_cert: str = ""
    tls_key: str = ""
    drain_timeout_seconds: float = 300.0
    max_instances: int = 256
    # An instance with a heartbeat every 3 s expires 10 s after its last heartbeat.
    missed_beats: int = 3
    probe_interval_seconds: float = 2.0
    probe_timeout_seconds: float = 5.0

    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    # If a decode instance must compute fewer tokens of a prompt than this, it gets no prefill leg.
    bypass_tokens: int = 0
    # Prompt prefixes that the proxy remembers, in blocks of 256 bytes; each takes about 100 bytes.
    max_prefix_blocks: int = 250_000

    # Limits on legs in flight (one role at one instance) and on running requests (in all). Requests
    # above a limit wait in the queue, up to `max_queued` of them, each for `queue_timeout_seconds`.
    max_in_flight_per_instance: int = 1024
    max_in_flight: int = 4096
    max_queued: int = 1024
    queue_timeout_seconds: float = 60.0
    # How many other pairs are tried if one fails before the client has received anything.
    max_retries: int = 2
    # After this many failures in a row, a role of an instance gets no legs for `breaker_seconds`,
    # then one as a trial.
    breaker_failures: int = 5
    breaker_seconds: float = 30.0

    # Sequential: prefill, then decode. Concurrent: both at once; decode's answer waits for prefill.
    dispatch: str = SEQUENTIAL
    max_body_bytes: int = 64 << 20
    # Bytes of requests in progress that are kept in all, without the first 64 KiB of each.
    max_body_memory_bytes: int = 1 << 30
    # Connections of clients at a time; fewer if the process may not have so many descriptors.
    max_connections: int = 16_384
    # Limits on a client's connection: without a request, and with half of a request's head. Load
    # balancers keep idle connections for 60 s. Ours must last longer, so that they close first.
    idle_timeout_seconds: float = 75.0
    head_timeout_seconds: float = 20.0
    # Limit on the client: to send its whole request, and to take each piece of the answer.
    client_timeout_seconds: float = 120.0
    connect_timeout_seconds: float = 5.0
    prefill_timeout_seconds: float = 600.0
    # Limits on decode: a stream's first byte, the gap between two pieces of it, and the whole of an
    # answer that is not a stream.
    first_byte_timeout_seconds: float = 600.0
    gap_timeout_seconds: float = 120.0
    response_timeout_seconds: float = 3600.0
    # How long requests in progress may continue after the proxy is told to stop.
    shutdown_timeout_seconds: float = 10.0
    # URL at which a collector of OpenTelemetry takes spans; empty: as the OTEL_* variables say.
    otlp_traces_endpoint: str = ""
    # The share of requests without a `traceparent` that get one. If spans are sent, 0 leaves it to
    # OTEL_TRACES_SAMPLER; else the trace has the transfer's id.
    trace_share: float = 0.0

    def __post_init__(self) -> None:
        """Validate every value.

        Raises:
            ConfigError: names the key, its value and the allowed values.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("port"):
                _require(field.name, value, 0 <= value <= 65535, "0 to 65535")
            elif field.name.endswith("share"):
                _require(field.name, value, 0 <= value <= 1, "0 to 1")
            elif field.name in MAY_BE_ZERO:
                _require(field.name, value, value >= 0, "0 or more")
            elif isinstance(value, (int, float)):
                _require(field.name, value, 0 < value < float("inf"), "a number above 0")
        for key in ("prefill", "decode", "both"):
            parse_static(getattr(self, key))
        for peer in self.peer_addresses:
            _require("peers", peer, is_address(peer), "host:port, separated by commas")
        if bool(self.tls_cert) != bool(self.tls_key):
            key = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(f"{key} is ''; allowed: a file, as tls_cert and tls_key go together")
        url = self.otlp_traces_endpoint
        _require("otlp_traces_endpoint", url, is_url(url) or not url, "http[s]://HOST[:PORT]/PATH")
        _require("dispatch", self.dispatch, self.dispatch in DISPATCHES, ", ".join(DISPATCHES))

    @property
    def own_addresses(self) -> list[tuple[str, int]]:
        """The hosts and ports on which the proxy listens, as far as they are chosen here."""
        listeners = ((self.host, self.port), (self.registration_host, self.registration_port))
        return [(host, port) for host, port in listeners if port]

    @property
    def peer_addresses(self) -> list[str]:
        """The registration addresses of the other proxies."""
        return [peer.strip() for peer in self.peers.split(",") if peer.strip()]


def _require(key: str, value: object, is_met: bool, allowed: str) -> None:
    if not is_met:
        raise ConfigError(f"{key} is {value!r}; allowed: {allowed}")
