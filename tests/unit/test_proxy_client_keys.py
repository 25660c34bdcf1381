"""The file of client keys: what it may say, and what each client may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_engine.errors import ConfigError
from proxy.errors import ProxyError
from proxy.fleet.key_files import read_key
from proxy.http.asgi import Ends
from proxy.routing.clients import MIN_KEY_CHARS, ClientKeys, KnownClient

ALICE, BOB = "alices-secret-key-1", "bobs-secret-key-2345"


def written(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def clients(path: Path, text: str, now: float = 0.0) -> ClientKeys:
    return ClientKeys(written(path, text), "", lambda: now)


def test_each_line_is_a_client(tmp_path: Path) -> None:
    text = f"# name key\n\nalice {ALICE} in_flight=2\nbob\t{BOB}  per_minute=5 in_flight=1\n"
    known = clients(tmp_path / "keys", text)
    found = known.find(f"Bearer {ALICE}")
    assert found is not None
    assert (found.name, found.in_flight, found.per_minute) == ("alice", 2, 0)
    found = known.find(f"bearer {BOB}")
    assert found is not None
    assert (found.name, found.in_flight, found.per_minute) == ("bob", 1, 5)


@pytest.mark.parametrize(
    "given", ["", "Bearer ", "Bearer x", ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x", "Bearer é"]
)
def test_a_missing_or_wrong_key_is_a_401(given: str, tmp_path: Path) -> None:
    known = clients(tmp_path / "keys", f"alice {ALICE}")
    with pytest.raises(ProxyError) as caught:
        known.find(given)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "text",
    [
        "", "# nobody\n", "alice", f"alice {'x' * (MIN_KEY_CHARS - 1)}", f"{ALICE}",
        f"a b {ALICE}", f"alice {ALICE} in_flight=0", f"alice {ALICE} in_flight=-1",
        f"alice {ALICE} per_hour=1", f"alice {ALICE}\nalice {BOB}", f"alice {ALICE}\nbob {ALICE}",
        f"../x {ALICE}", f"alice {ALICE}é",
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_is_refused_without_showing_its_key(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="client_keys_file") as caught:
        clients(tmp_path / "keys", text)
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    written(path, f"alice {ALICE}")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others: chmod 600"):
        ClientKeys(str(path), "", lambda: 0.0)
    for setting in ("admin_key_file", "instance_key_file"):
        with pytest.raises(ConfigError, match=f"{setting} .*chmod 600"):
            read_key(setting, str(path))


def test_requests_in_progress_are_limited_until_they_end() -> None:
    client, first, second = KnownClient("a", in_flight=1), Ends(), Ends()
    client.begin(0.0, first)
    with pytest.raises(ProxyError) as caught:
        client.begin(0.0, second)
    assert (caught.value.status, caught.value.code) == (429, "client_limit")
    first.close()
    client.begin(0.0, second)
    second.close()
    assert client.num_running == 0


def test_who_is_at_a_limit_of_rate_hears_when_the_next_request_may_come() -> None:
    client = KnownClient("a", per_minute=6)
    for _ in range(6):
        client.begin(100.0, Ends())
    with pytest.raises(ProxyError) as caught:
        client.begin(103.5, Ends())
    assert dict(caught.value.answer_to_client().headers)[b"retry-after"] == b"7"
    client.begin(110.0, Ends())


def test_requests_in_a_minute_are_limited() -> None:
    client, now, admitted = KnownClient("a", per_minute=60), 0.0, 0
    for step in range(1200):
        now = step / 10
        try:
            client.begin(now, Ends())
        except ProxyError:
            continue
        admitted += 1
    assert 60 + 119 <= admitted <= 60 + 121  # at once, and then one in a second


def test_a_client_that_stays_keeps_its_counts(tmp_path: Path) -> None:
    path, ends = tmp_path / "keys", Ends()
    known = clients(path, f"alice {ALICE} in_flight=1\nbob {BOB}")
    before = known.find(f"Bearer {ALICE}")
    assert before is not None
    known.admit(before, ends)
    written(path, f"alice {BOB} in_flight=2\n")
    known.reload()
    after = known.find(f"Bearer {BOB}")
    assert after is not None
    assert after.name == "alice"
    known.admit(after, ends)
    with pytest.raises(ProxyError, match="2 requests in progress"):
        known.admit(after, ends)
    with pytest.raises(ProxyError, match="wrong"):
        known.find(f"Bearer {ALICE}")
    written(path, "nonsense")
    with pytest.raises(ConfigError):
        known.reload()
    assert known.find(f"Bearer {BOB}") is not None


@pytest.mark.parametrize(
    ("has_file", "instance_key", "passed_on"),
    [
        (False, "", "Bearer theirs"),
        (True, "", ""),
        (False, "k", "Bearer k"),
        (True, "k", "Bearer k"),
    ],
)
def test_a_clients_key_of_this_proxy_stays_here(
    has_file: bool, instance_key: str, passed_on: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys", f"alice {ALICE}") if has_file else ""
    assert ClientKeys(path, instance_key, lambda: 0.0).passed_on("Bearer theirs") == passed_on


def test_a_file_that_is_too_large_is_refused_and_not_cut(tmp_path: Path) -> None:
    lines = "".join(f"client{number} {ALICE}{number:06}\n" for number in range(40_000))
    with pytest.raises(ConfigError, match=r"client_keys_file '.*' is larger than 1048576 bytes"):
        clients(tmp_path / "keys", lines)
