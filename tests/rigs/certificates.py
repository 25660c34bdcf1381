"""A certificate for 127.0.0.1 that signs itself, and what a client says first in TLS."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")


def made_certificate(folder: Path, name: str) -> dict[str, str]:
    """Make one, and return the proxy's settings for it."""
    files = {"tls_cert": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", files["tls_key"], "-out", files["tls_cert"]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def careless_context() -> ssl.SSLContext:
    """Return the settings of a client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def client_hello() -> bytes:
    """Return what a client says first."""
    said = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return said.read()
