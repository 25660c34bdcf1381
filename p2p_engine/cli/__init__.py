"""The command line `p2p-engine`; app.py has its commands."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; heavy libraries are imported only when a command needs them."""
    from p2p_engine.cli.app import app

    app()
