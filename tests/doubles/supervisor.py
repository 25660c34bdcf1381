"""Processes as vLLM's supervisor of data-parallel ranks makes them: a server, and its engine."""

from __future__ import annotations

import multiprocessing
import socket
from typing import Any

from p2p_engine.connector import serving

SECONDS = 300.0


def serve(ports: list[int], results: Any) -> None:
    """Start the engine and, when it has looked for us in vain, listen on the second port."""
    context = multiprocessing.get_context("spawn")
    has_looked, go = context.Event(), context.Event()
    engine = context.Process(target=_find, args=(ports, has_looked, go, results))
    engine.start()
    has_looked.wait(SECONDS)
    with socket.create_server(("127.0.0.1", ports[1])):
        go.set()
        engine.join(SECONDS)


def _find(ports: list[int], has_looked: Any, go: Any, results: Any) -> None:
    server = serving.SupervisedServer("h", ports[0], 5)
    early = server.address()
    has_looked.set()
    go.wait(SECONDS)
    results.put((serving.supervised_rank(), early, server.address()))
