"""The command line: `p2p-engine proxy --port 10001`."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn, cast

import uvicorn

from p2p_engine.errors import ConfigError
from proxy.app import create_app
from proxy.config import DISPATCHES, ProxyConfig
from proxy.routing.policies import POLICIES

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable, Sequence

    from proxy.app import ProxyApp

logger = logging.getLogger(__name__)

# Connections that the kernel keeps until they are accepted; it takes no more than its somaxconn.
BACKLOG = 4096
LOG_FORMAT = "%(asctime)s.%(msecs)03d+00:00 %(levelname)s %(name)s %(message)s"
HELP = {
    "host": "address of the HTTP server",
    "port": "port of the HTTP server",
    "registration_host": "address on which the proxy takes heartbeats",
    "registration_port": "port on which the proxy takes heartbeats",
    "peers": "registration addresses of other proxies, separated by commas; the proxy forwards "
    "every heartbeat to them",
    "prefill": "prefill instances that send no heartbeats: HTTP_ADDRESS[@KV_ADDRESS],...",
    "decode": "decode instances that send no heartbeats",
    "both": "instances of both roles that send no heartbeats",
    "allowed_addresses": "host names and networks from which instances may register; empty: any",
    "key_file": "file with the fleet's key (p2p-engine keygen); empty: anyone can register",
    "admin_key_file": "file with the key for adding and removing instances; empty: nobody can",
    "client_keys_file": "file with the keys of clients: NAME KEY [in_flight=N] [per_minute=N] in "
    "each line; empty: anybody may send requests",
    "instance_key_file": "file with the key that the proxy shows to instances",
    "tls_cert": "file with the certificate chain for TLS towards clients; empty: plain HTTP",
    "tls_key": "file with the private key of that certificate",
    "drain_timeout_seconds": "how long a removed instance may take to finish its requests",
    "max_instances": "how many instances may be registered at a time",
    "missed_beats": "after this many missed heartbeats in a row the proxy drops an instance",
    "probe_interval_seconds": "seconds between two probes of an instance's /health",
    "probe_timeout_seconds": "how long an instance may take to answer /health",
    "prefill_policy": "how the proxy chooses a prefill instance",
    "decode_policy": "how the proxy chooses a decode instance",
    "bypass_tokens": "if decode lacks fewer tokens of a prompt than this, it computes them itself",
    "max_prefix_blocks": "how many blocks of 256 bytes of prompts the proxy remembers",
    "max_in_flight_per_instance": "how many requests one instance may have in progress in one role",
    "max_in_flight": "how many requests may be in progress in all",
    "max_queued": "how many requests may wait in the queue",
    "queue_timeout_seconds": "how long a request may wait in the queue",
    "max_retries": "how many other pairs are tried if one fails before the first byte",
    "breaker_failures": "after this many failures in a row an instance gets no more requests",
    "breaker_seconds": "after this time such an instance gets one request as a trial",
    "dispatch": "run prefill before decode, or both at once",
    "max_body_bytes": "how large the body of a request may be",
    "max_body_memory_bytes": "how much of the bodies of all requests may be kept at a time",
    "max_connections": "how many connections clients may have; fewer if descriptors are short",
    "idle_timeout_seconds": "how long a client's connection may stay open without a request",
    "head_timeout_seconds": "how long the head of a request may take to arrive",
    "client_timeout_seconds": "how long a client may take to send its request, and to read each "
    "piece of the answer",
    "connect_timeout_seconds": "how long connecting to an instance may take",
    "prefill_timeout_seconds": "how long the prefill instance may take in all",
    "first_byte_timeout_seconds": "how long the first byte of a stream may take",
    "gap_timeout_seconds": "how long a stream may be silent after its first byte",
    "response_timeout_seconds": "how long an answer that is not a stream may take in all",
    "shutdown_timeout_seconds": "how long requests in progress may take once the proxy is stopped",
    "otlp_traces_endpoint": "URL at which a collector of OpenTelemetry takes spans, such as "
    "http://HOST:4318/v1/traces; empty: as the OTEL_* variables say, else none are sent",
    "trace_share": "share of the requests without a traceparent that get one, sampled (0 to 1)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy until it is told to stop; return the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    handler = logging.StreamHandler()
    handler.setFormatter(_UtcFormatter(LOG_FORMAT, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=options.pop("log_level").upper(), handlers=[handler])
    # These lines are JSON for programs, so they get no prefix.
    access = logging.getLogger("proxy.access")
    access.propagate = False
    access.addHandler(logging.StreamHandler())
    try:
        config = ProxyConfig(**options)
        check_listeners(config)
        server = make_server(config)
    except ConfigError as error:
        parser.error(str(error))
    signal.signal(signal.SIGHUP, lambda *_: reload(cast("ProxyApp", server.config.app)))
    _look_for_garbage_seldom()
    outlet = cast("ProxyApp", server.config.app).outlet
    outlet.take_over(logging.getLogger(), access)
    # uvicorn raises the signal again after it has stopped. SIGTERM is a normal end: exit with 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with suppress(KeyboardInterrupt):
            server.run()
    finally:
        outlet.close()
    return 0 if server.started else 1


def reload(app: ProxyApp) -> None:
    """Read the files of keys and the certificate again; what cannot be used changes nothing."""
    num_failed = 0
    for read_again in app.reloads:
        try:
            read_again()
        except ConfigError as error:
            num_failed += 1
            logger.error("not read again: %s", error)
    if not num_failed:
        logger.info("keys and certificate read again")


def check_listeners(config: ProxyConfig) -> None:
    """Check that the proxy can listen where it is told to: uvicorn would begin to serve, and stop.
    May block in the resolver.

    Raises:
        ConfigError: names the setting, the address and what is wrong with it.
    """
    with ExitStack() as probes:
        for key, host, port, is_dual in (
            ("host", config.host, config.port, False),
            ("registration_host", config.registration_host, config.registration_port, True),
        ):
            try:
                found = socket.getaddrinfo(
                    host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                for family, kind, protocol, _, address in found:
                    probe = probes.enter_context(socket.socket(family, kind, protocol))
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        only = int(not is_dual or len(found) > 1)
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                    probe.bind(address)
                    if config.port == config.registration_port:
                        probe.listen()  # else the other one could be bound, too
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"{key}: cannot listen on {host}:{port}: {reason}") from error


def _look_for_garbage_seldom() -> None:
    """Make garbage collections short, and full ones rare.

    A collection stops everybody for 1 ms for each 10,000 objects that it looks at; a connection has
    some 40. So new objects are looked at in small numbers, 2,500 at the most, twice, and then
    nearly never again: requests and connections leave no circles of references. With Python's own
    settings, full collections would take a tenth of the time, and 3,000 connections would make one
    of 100 ms.
    """
    gc.freeze()
    gc.set_threshold(1250, 0, 1000)


def make_server(config: ProxyConfig) -> uvicorn.Server:
    """Make the HTTP server."""
    app = create_app(config)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=cast("type[asyncio.Protocol]", app.house.open_door),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=_context_factory(app),
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_seconds)),
    )
    return app.make_server(settings)


def _context_factory(app: ProxyApp) -> Callable[..., ssl.SSLContext] | None:
    certificate = app.certificate
    return None if certificate is None else lambda *_: certificate.context


class _UtcFormatter(logging.Formatter):
    """Writes times as the lines of requests have them."""

    converter = staticmethod(time.gmtime)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong: the usage has one line for each setting."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end the command."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="p2p-engine proxy",
        description="Route requests to prefill and decode instances, which register by heartbeat.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    policies = tuple(POLICIES)
    choices = {"dispatch": DISPATCHES, "prefill_policy": policies, "decode_policy": policies}
    for field in fields(ProxyConfig):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            choices=choices.get(field.name),
            help=HELP[field.name],
        )
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="info", help="how much is logged")
    return parser
