"""A cheap double of a vLLM instance or the proxy: an HTTP server with a bad character.

usage: member.py --port N [--status WORDS] [--kv-transfer-config JSON] [--behave NAME ...]
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--status", default="")
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--behave", nargs="*", default=[])
    arguments, _ = parser.parse_known_args()
    for line in (
        "non-default args: {}",
        "Initializing a V1 LLM engine",
        "Loading weights took 0 s",
    ):
        say(line)
    if "ignore-sigterm" in arguments.behave:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in arguments.behave:
        _start_grandchild()
    if "die-at-start" in arguments.behave:
        say("ValueError: no such model")
        sys.exit(3)
    if "never-serve" in arguments.behave:
        threading.Event().wait()
    if arguments.kv_transfer_config is not None:
        threading.Thread(target=_beat, args=[arguments.kv_transfer_config], daemon=True).start()
    _serve(arguments.port, arguments.status)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _start_grandchild() -> None:
    """Start a process that leaves our session and ignores SIGTERM, as stubborn as can be."""
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", program + "; time.sleep(600)"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    if child.stdout.readline() == b"up\n":
        say(f"grandchild={child.pid}")


def _beat(config: dict[str, Any]) -> None:
    """Tell the proxy of ourselves, as a connector does."""
    import msgspec
    import zmq

    extra = config["kv_connector_extra_config"]
    heartbeat = {
        "type": "P" if config["kv_role"] == "kv_producer" else "D",
        "http_address": f"127.0.0.1:{extra['http_port']}",
        "zmq_address": f"127.0.0.1:{config['kv_port']}",
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://{extra['proxy_ip']}:{extra['proxy_port']}")
        while True:
            socket.send(msgspec.msgpack.encode(heartbeat))
            time.sleep(0.2)


def _serve(port: int, status: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/die":
                say("RuntimeError: asked to die")
                os._exit(4)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(status.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        say("Application startup complete")
        server.serve_forever()


if __name__ == "__main__":
    main()
