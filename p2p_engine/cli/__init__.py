"""The command line `p2p-engine`: launch, simulate, proxy, doctor, demo and bench."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; its libraries are loaded only then."""
    from p2p_engine.cli.app import app

    app()
