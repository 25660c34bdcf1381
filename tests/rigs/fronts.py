"""Servers that people put in front of the proxy: the real nginx and HAProxy, if they are there.

Each gives every request an id of its own, so a request without one has not come through the front.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import eventually

ID_PREFIX = "front-"
PROGRAMS = {"nginx": "nginx", "haproxy": "haproxy"}

_NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1; user root;
events {{ worker_connections 256; }}
http {{
  access_log off; client_max_body_size 64m;
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
defaults
  mode http
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  {more}
frontend clients
  bind 127.0.0.1:{port}
  http-request set-header X-Request-Id front-%[uuid()]
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


def is_installed(front: str) -> bool:
    """Tell whether the program of a front is there."""
    return shutil.which(front.partition(",")[0]) is not None


@contextmanager
def running_front(front: str, proxy_port: int, folder: Path) -> Iterator[int]:
    """Run a front before a proxy on 127.0.0.1; yields its port."""
    template, more = FRONTS[front]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "front.conf"
    config.write_text(template.format(folder=folder, port=port, proxy=proxy_port, more=more))
    program = front.partition(",")[0]
    options = {
        "nginx": ["-c", str(config), "-p", str(folder)],
        "haproxy": ["-db", "-f", str(config)],
    }
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([program, *options[program]], stdout=output, stderr=output)
    try:
        eventually(lambda: _listens(port), 20, f"{front} listens: {folder / 'output'}")
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
