"""Servers that people put in front of the proxy: the real nginx and HAProxy, if they are there.

Each gives every request an id of its own, so a request without one has not come through the front.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.support import eventually

ID_PREFIX = "front-"
# Where scripts/get_fronts.sh puts the programs of a machine that does not have them.
UNPACKED = Path(__file__).parents[2] / "build" / "fronts"

_NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1; user root;
events {{ worker_connections 256; }}
http {{
  log_format seen "seen front-$request_id $status $request_uri";
  access_log {folder}/seen seen; client_max_body_size 64m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream proxy {{ server 127.0.0.1:{proxy}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://proxy; proxy_set_header X-Request-Id front-$request_id; {more}
    }}
  }}
}}
"""
_HAPROXY = """
global
  maxconn 256
  log stdout format raw daemon
defaults
  log global
  mode http
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  {more}
frontend clients
  bind 127.0.0.1:{port}
  http-request set-header X-Request-Id front-%[uuid()]
  http-request capture req.hdr(X-Request-Id) len 64
  http-request capture path len 64
  log-format "seen %[capture.req.hdr(0)] %ST %[capture.req.hdr(1)]"
  default_backend proxies
backend proxies
  http-reuse always
  server proxy 127.0.0.1:{proxy} pool-max-conn 2
"""
# What people write, from the defaults to what lets the most pass.
FRONTS = {
    "nginx": (_NGINX, ""),
    "nginx, kept connections": (
        _NGINX, 'proxy_http_version 1.1; proxy_set_header Connection "";',
    ),
    "nginx, upgrades": (
        _NGINX,
        "proxy_http_version 1.1; proxy_request_buffering off; proxy_buffering off; "
        'proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";',
    ),
    "haproxy": (_HAPROXY, ""),
    "haproxy, lenient": (_HAPROXY, "option accept-invalid-http-request"),
}  # fmt: skip


def program(front: str) -> str | None:
    """Return where the program of a front is; None if it is not there."""
    return shutil.which(
        front.partition(",")[0], path=f"{os.environ['PATH']}:/usr/sbin:{UNPACKED}/usr/sbin"
    )


class Front:
    """A server that runs before a proxy."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self._folder = folder

    def seen(self) -> list[tuple[str, int, str]]:
        """Return the id, the status and the path of each request that it has answered."""
        logs = [self._folder / name for name in ("seen", "output")]
        text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        lines = [line.split() for line in text.splitlines()]
        words = [line for line in lines if line[:1] == ["seen"] and len(line) == 4]
        return [(name, int(status), path) for _, name, status, path in words]


@contextmanager
def running_front(front: str, proxy_port: int, folder: Path) -> Iterator[Front]:
    """Run a front before a proxy on 127.0.0.1."""
    template, more = FRONTS[front]
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "front.conf"
    config.write_text(template.format(folder=folder, port=port, proxy=proxy_port, more=more))
    path, name = program(front), front.partition(",")[0]
    assert path is not None
    libraries = ":".join(map(str, UNPACKED.glob("usr/lib/*-linux-*")))
    options = {
        "nginx": ["-c", str(config), "-p", str(folder)],
        "haproxy": ["-db", "-f", str(config)],
    }
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [path, *options[name]], stdout=output, stderr=output,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )  # fmt: skip
    try:
        eventually(lambda: _listens(port), 20, f"{front} listens: {folder / 'output'}")
        yield Front(port, folder)
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
