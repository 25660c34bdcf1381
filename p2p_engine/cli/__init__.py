"""The command line `p2p-engine`: launch, simulate, keygen, proxy, bench, doctor
and demo."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; its libraries are loaded only then."""
    from p2p_engine.cli.app import app

    app()
