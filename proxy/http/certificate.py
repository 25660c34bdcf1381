"""Certificate: two files for TLS towards clients, which can be read again while the proxy runs."""

from __future__ import annotations

import ssl
import sys

from p2p_engine.errors import ConfigError

OLDEST_PYTHON = (3, 11)  # whose asyncio has the TLS that TlsGuest needs


class Certificate:
    """A server's certificate and key; connections that are open keep those they began with."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        """Read both.

        Raises:
            ConfigError: they cannot be read, or do not belong together; or Python is too old.
        """
        if sys.version_info < OLDEST_PYTHON:
            raise ConfigError(
                "tls_cert needs Python 3.11; without it, use a server in front for TLS"
            )
        self._files = certificate_file, key_file
        self.context = self._read()

    def reload(self) -> None:
        """Read both again, for new connections.

        Raises:
            ConfigError: they cannot be used; the old ones stay.
        """
        self.context = self._read()

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self._files, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            names = " and ".join(map(repr, self._files))
            raise ConfigError(f"tls_cert and tls_key {names} cannot be used: {error}") from error
        return context


def _no_password() -> str:
    """Refuse keys with a password, for which OpenSSL would ask on the terminal."""
    raise ValueError("the key has a password")
