"""A certificate for 127.0.0.1 that signs itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
