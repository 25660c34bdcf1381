"""Key files: written once, read strictly, and a warning that cannot be missed without one."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from p2p_engine.control import fleet_key as keys
from p2p_engine.control.fleet_key import (
    derive,
    is_loopback,
    read_key_file,
    warn_if_exposed,
    write_key_file,
)
from p2p_engine.errors import ConfigError
from tests.support import records_of

SECRET = "5a" * 32


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_file_is_written_once(tmp_path: Path) -> None:
    path, other = tmp_path / "fleet.key", tmp_path / "other.key"
    for each in (path, other):
        write_key_file(each)
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    before = path.read_text()
    with pytest.raises(ConfigError, match="never overwritten"):
        write_key_file(path)
    assert path.read_text() == before
    secrets = read_key_file(str(path))
    assert [len(secret) for secret in secrets] == [32]
    assert secrets != read_key_file(str(other))


def test_a_link_is_not_followed_and_a_folder_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("link", "nowhere/fleet.key"):
        with pytest.raises(ConfigError, match=name):
            write_key_file(tmp_path / name)
    assert not (tmp_path / "target").exists()


def test_several_secrets_keep_their_order(tmp_path: Path) -> None:
    text = f"# old and new\n\n{'11' * 32}\n  {'22' * 32}  \n"
    path = write(tmp_path / "fleet.key", text, 0o440)  # as a container is given it
    assert read_key_file(path) == (b"\x11" * 32, b"\x22" * 32)
    assert read_key_file("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "0 secrets"),
        ("# only words\n", "0 secrets"),
        (f"{SECRET}\n{SECRET}\n", "2 secrets"),
        ("\n".join(f"{n:064x}" for n in range(9)), "9 secrets"),
        (f"{SECRET}\n{SECRET[:-1]}\n", "line 2"),
        (f"{SECRET} {SECRET}", "line 1"),
        (" ".join([SECRET[:2]] * 32), "line 1"),
        ("not hexadecimal", "line 1"),
    ],
)
def test_what_is_no_key_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path / "fleet.key", text)
    with pytest.raises(ConfigError, match=told) as refusal:
        read_key_file(path)
    assert path in str(refusal.value)
    assert SECRET not in str(refusal.value)


def test_a_file_that_is_open_to_everybody_or_absent_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "fleet.key", SECRET, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(path)
    with pytest.raises(ConfigError, match=r"nothing\.key"):
        read_key_file(str(tmp_path / "nothing.key"))


def test_keys_of_different_purposes_have_nothing_in_common() -> None:
    secret = bytes.fromhex(SECRET)
    assert derive(secret, b"server") != derive(secret, b"client") != derive(bytes(32), b"client")
    assert derive(secret, b"server") == derive(secret, b"server")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True),
     ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
     ("localhost.evil", False), ("", False)],
)  # fmt: skip
def test_loopback_is_what_only_this_machine_reaches(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local


def test_the_warning_comes_once_for_each_open_address(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warn_if_exposed("192.0.2.1", ())
            warn_if_exposed("192.0.2.2", (b"a secret",))
            warn_if_exposed("127.0.0.1", ())
    assert [record.levelname for record in records_of(keys.logger, caplog)] == ["WARNING"]
    assert "NOT AUTHENTICATED: anyone who can reach 192.0.2.1" in caplog.text
