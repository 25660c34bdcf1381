"""`p2p-engine doctor --pair` asks running directories, and names what differs between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from typer.testing import CliRunner

from p2p_engine.cli import pairing
from p2p_engine.cli.app import app
from p2p_engine.config import EngineConfig
from p2p_engine.control.fleet_key import write_key_file
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.wire.identity import digest_of, pack
from p2p_engine.wire.messages import CacheSpec
from tests.rigs.caches import Model, RankCache, Split

pytestmark = pytest.mark.usefixtures("no_leaks")

SPEC = RankCache(Model(), Split(), 0, 4).spec
FIELDS = {f"hf.number_{number:02}": "1" for number in range(20)} | {"quantization": "none"}
OTHER = dict.fromkeys(FIELDS, "2") | {"quantization": "fp8"}
Publish: TypeAlias = Callable[..., str]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Start a directory of an instance with these fields; its address."""
    with contextlib.ExitStack() as stack:

        def start(fields: dict[str, str], key_file: str = "", **changes: Any) -> str:
            spec: CacheSpec = msgspec.structs.replace(SPEC, identity=digest_of(fields), **changes)
            rank = RankAddress(0, "127.0.0.1:1", 1, spec, pack(fields))
            config = EngineConfig(key_file=key_file)
            return stack.enter_context(Directory(config, [rank], kv_port=0, role="D")).address

        yield start


def run(*addresses: str, key_file: str = "") -> tuple[int, str]:
    """The exit code, and what is printed."""
    asked = ("doctor", "--pair", ",".join(addresses), "--key-file", key_file)
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_instances_that_are_alike_pair(publish: Publish) -> None:
    code, text = run(*(publish(FIELDS, tp_size=tp_size) for tp_size in (1, 2)))
    assert code == 0, text
    assert "they pair" in text
    assert "weights" in text
    assert "not compared" in text


def test_every_differing_field_is_named_with_both_values(publish: Publish) -> None:
    one, other, third = (publish(each) for each in (FIELDS, OTHER, FIELDS))
    code, text = run(one, other, third)
    assert code == 1
    assert text.count("they refuse each other") == 2
    assert f"{one} here, {third} there" in text.replace("\n", " ")
    assert text.count("they pair") == 1
    assert text.count("quantization: 'none' here, 'fp8' there") == 1
    assert text.count("quantization: 'fp8' here, 'none' there") == 1
    for name in OTHER:
        assert text.count(f"{name}: ") == 2


def test_a_cache_that_differs_is_named_beside_the_fields(publish: Publish) -> None:
    code, text = run(publish(FIELDS), publish(OTHER, dtype="bfloat16"))
    assert code == 1
    assert "quantization: 'none' here, 'fp8' there" in text
    assert "dtype: '' here, 'bfloat16' there" in text


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "changes",
    [{"rank": 9}, {"layer_cuts": (0, 1, 2), "rank": 7, "page_bytes": []}, {"layer_cuts": (2, 1)}],
)
def test_who_describes_the_impossible_is_named(
    publish: Publish, changes: dict[str, Any], order: int
) -> None:
    code, text = run(*[publish(FIELDS), publish(FIELDS, **changes)][::order])
    assert code == 1
    assert f"the ranks {'there' if order > 0 else 'here'} cannot share the model" in text


@pytest.mark.parametrize(
    ("packed", "said"),
    [(b"noise", "bad identity of 5 bytes"), (b"", f"here, '{digest_of(OTHER).hex()}' there")],
)
def test_without_fields_the_refusal_is_still_named(
    publish: Publish, packed: bytes, said: str
) -> None:
    spec = msgspec.structs.replace(SPEC, identity=digest_of(OTHER))
    rank = RankAddress(0, "127.0.0.1:1", 1, spec, packed)
    with Directory(EngineConfig(), [rank], kv_port=0, role="D") as directory:
        code, text = run(publish(FIELDS), directory.address)
    assert code == 1
    assert said in text
    assert "hf.number_00" not in text


def test_an_instance_that_does_not_answer_is_named(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "ANSWER_SECONDS", 0.5)
    with Directory(EngineConfig(), [], kv_port=0, role="D") as starting:
        code, text = run(publish(FIELDS), starting.address)
        assert code == 1
        assert f"{starting.address}" in text
        assert "no answer within 0.5 s" in text


def test_with_a_key_only_members_may_ask(tmp_path: Path, publish: Publish) -> None:
    key, stranger = tmp_path / "fleet.key", tmp_path / "other.key"
    for path in (key, stranger):
        write_key_file(path)
    both = publish(FIELDS, str(key)), publish(OTHER, str(key))
    code, text = run(*both, key_file=str(key))
    assert "they refuse each other" in text
    assert str(key) not in text
    code, text = run(*both, key_file=str(stranger))
    assert code == 1
    assert "quantization" not in text


@pytest.mark.parametrize(
    ("addresses", "why"),
    [
        (["127.0.0.1:1"], "1 instances; 2 to 32"),
        (["127.0.0.1:1", "127.0.0.1:1"], "1 instances"),
        (["127.0.0.1:1", "nowhere"], "'nowhere' is not host:port"),
        ([f"127.0.0.1:{port}" for port in range(1, 40)], "39 instances"),
    ],
    ids=["one", "twice the same", "no address", "too many"],
)
def test_what_cannot_be_asked_is_said_at_once(addresses: list[str], why: str) -> None:
    code, text = run(*addresses)
    assert code == 2
    assert why in text.replace("│\n│ ", "")
