"""The command line: `python -m proxy --port 10001 --registration-port 30001`."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

import uvicorn

from p2p_engine.errors import ConfigError
from proxy.app import create_app
from proxy.config import CHOICES, ProxyConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP = {
    "host": "address of the HTTP server",
    "port": "port of the HTTP server",
    "registration_host": "address on which heartbeats are taken",
    "registration_port": "port on which heartbeats are taken",
    "peers": "registration addresses of other proxies, which are told of every heartbeat",
    "prefill": "prefill instances without heartbeats: HTTP_ADDRESS[@KV_ADDRESS],...",
    "decode": "decode instances without heartbeats",
    "both": "instances of both roles without heartbeats",
    "allowed_addresses": "host names and networks from which instances may come; empty: any",
    "key_file": "file with the fleet's key (p2p-engine keygen); empty: anybody can register",
    "admin_key_file": "file with the key for adding and removing instances; empty: nobody can",
    "drain_timeout_seconds": "time for the requests of an instance that is removed",
    "max_instances": "instances that may be registered at a time",
    "missed_beats": "heartbeats in a row that may be missed before an instance is forgotten",
    "probe_interval_seconds": "time between two looks at an instance's /health",
    "probe_timeout_seconds": "time for an instance to answer /health",
    "prefill_policy": "how a prefill instance is chosen",
    "decode_policy": "how a decode instance is chosen",
    "bypass_tokens": "decode computes a prompt itself if fewer of its tokens are missing there",
    "max_prefix_blocks": "blocks of 256 bytes of prompts whose whereabouts are remembered",
    "max_in_flight_per_instance": "legs of one role that an instance has at a time",
    "max_in_flight": "requests in progress at a time",
    "max_queued": "requests that may wait for room",
    "queue_timeout_seconds": "time that a request may wait for room",
    "max_retries": "other pairs that are tried when one fails before the first byte",
    "breaker_failures": "failed legs in a row after which an instance gets no more",
    "breaker_seconds": "time until it gets one to prove itself",
    "dispatch": "prefill before decode, or both at once",
    "max_body_bytes": "size of the largest request",
    "client_timeout_seconds": "time for a client to send its request, or to take a piece of answer",
    "connect_timeout_seconds": "time to connect to an instance",
    "prefill_timeout_seconds": "time for the whole prefill leg",
    "first_byte_timeout_seconds": "time to the first byte of a decode stream",
    "gap_timeout_seconds": "silence in a decode stream after its first byte",
    "response_timeout_seconds": "time for the whole of an answer that is not a stream",
    "shutdown_timeout_seconds": "time for requests in progress when the proxy is told to stop",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy until it is told to stop; return the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    logging.basicConfig(
        level=options.pop("log_level").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # Its lines are JSON as they are, for programs.
    access = logging.getLogger("proxy.access")
    access.propagate = False
    access.addHandler(logging.StreamHandler())
    try:
        server = uvicorn.Server(server_config(ProxyConfig(**options)))
    except ConfigError as error:
        parser.error(str(error))
    _look_for_garbage_seldom()
    # The server stops at either signal and then raises it again: being told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 1


def _look_for_garbage_seldom() -> None:
    """Requests leave few cycles behind, but a tenth of the time would go into looking for them,
    and a look through all that was imported would hold up every request for 50 ms."""
    gc.freeze()
    gc.set_threshold(20_000)


def server_config(config: ProxyConfig) -> uvicorn.Config:
    """Return the settings of the HTTP server."""
    return uvicorn.Config(
        create_app(config),
        host=config.host,
        port=config.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Load balancers keep an idle connection for 60 s: theirs must be the first to close it.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_seconds)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proxy",
        description="Router for prefill and decode instances that register by heartbeat.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in fields(ProxyConfig):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            choices=CHOICES.get(field.name),
            help=HELP[field.name],
        )
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="info", help="what is logged")
    return parser
