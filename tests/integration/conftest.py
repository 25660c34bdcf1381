"""Fixtures of several tests of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.weights_fleet import KEY


@pytest.fixture
def admin_key(tmp_path: Path) -> str:
    """Return a file with the admin key of a `weights_fleet`."""
    path = tmp_path / "admin.key"
    path.touch(0o600)
    path.write_text(KEY)
    return str(path)
