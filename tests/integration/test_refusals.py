"""Every refusal that the documents list is provoked, and says what they say."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.cli.ports import PortPlan
from p2p_engine.errors import ConfigError, PeerRefused
from p2p_engine.memory.plan import obstacles
from p2p_engine.peers import locator, sessions
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.wire.identity import digest_of, pack
from p2p_engine.wire.messages import PROTOCOL_VERSION, CacheSpec, Location, PageShape, Plane
from tests.doubles.clock import Clock
from tests.rigs.caches import Model, RankCache, Split
from tests.rigs.engines import assert_idle, settings

PAGE = Path(__file__).parents[2] / "docs" / "connector.md"
ROW = re.compile(r"^\| (.+?) \| (HELLO|start) \| `(.+)` \|$", re.MULTILINE)
OTHER = {"hf.hidden_size": "512", "quantization": "fp8"}
HERE = RankCache(Model(), Split(), 0, 4)


def listed(when: str) -> dict[str, str]:
    """The rows of the table: what is refused, and the error, with … for what it names."""
    section = PAGE.read_text().split("## What is refused")[1].split("\n##")[0]
    return {what: error for what, moment, error in ROW.findall(section) if moment == when}


def says(error: object, pattern: str) -> re.Match[str] | None:
    """Find the documented text in an error; its groups are what stands for each …."""
    return re.search(re.escape(pattern).replace("…", "(.+)"), str(error), re.DOTALL)


def changed(**changes: Any) -> tuple[CacheSpec, CacheSpec]:
    """A description, and the same with some fields changed."""
    return HERE.spec, msgspec.structs.replace(HERE.spec, **changes)


def opaque(**changes: Any) -> tuple[CacheSpec, CacheSpec]:
    """Two descriptions that say nothing of the inside of a block."""
    spec = RankCache(Model(), Split(layout="opaque"), 0, 4).spec
    return spec, msgspec.structs.replace(spec, **changes)


FUSED = PageShape(4, 32, (Plane(0, 8, 8),))
Specs = tuple[CacheSpec | None, CacheSpec | None]
# What differs: the two descriptions, and the two values that an error must name.
UNLIKE: dict[str, tuple[Specs, object, object]] = {
    "another model, or another configuration": (
        changed(identity=digest_of(OTHER)), "", digest_of(OTHER).hex(),
    ),
    "another dtype of the cache": (changed(dtype="bfloat16"), "", "bfloat16"),
    "another number of KV heads": (changed(num_kv_heads=4), 2, 4),
    "another size of a head": (changed(head_size=64), 2, 64),
    "another number of layers": (changed(layer_cuts=(0, 3)), 2, 3),
    "another number of groups of layers": (changed(more=(HERE.spec,)), 1, 2),
    "another window": (changed(window=64), 0, 64),
    "other layers in a group": (changed(layers=(1,), page_bytes=[]), (0, 1), (1,)),
    "block sizes that differ, where layers look back at a window": (
        (changed(window=8)[1], changed(window=8, block_size=8, page_bytes=[1])[1]), 4, 8,
    ),
    "blocks kept otherwise: by instruction set, backend or quantisation": (
        changed(packing="cpu amx"), "", "cpu amx",
    ),
    "block sizes that differ, where blocks cannot be cut": (
        opaque(block_size=8, page_bytes=[1]), 4, 8,
    ),
    "rows of a token that differ": (
        changed(shape=FUSED, page_bytes=[]), [(1, 4), (1, 4)], [(1, 8)],
    ),
    "ranks that differ, beside states, or where nothing is known of a block's inside": (
        (changed(shape=None)[1], changed(shape=None, tp_size=2)[1]), 1, 2,
    ),
    "heads that the ranks there cannot share": (changed(tp_size=3), 3, 2),
    "layers that nobody there has": (changed(layer_cuts=(0, 2, 1)), 2, 1),
    "a rank that cannot be": (changed(rank=7), 7, 1),
    "an engine without a cache description, and one with": ((HERE.spec, None), True, False),
}  # fmt: skip


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.usefixtures("no_leaks")
def test_at_hello_both_values_are_named(what: str) -> None:
    (here, there), *values = UNLIKE[what]
    with contextlib.ExitStack() as stack:
        config = settings("shm")
        sender = stack.enter_context(P2pNcclEngine(config, spec=here))
        receiver = stack.enter_context(P2pNcclEngine(config, spec=there))
        address = RankAddress(0, receiver.zmq_address, receiver.epoch, there)
        ports = stack.enter_context(contextlib.closing(PortPlan("127.0.0.1")))
        directory = Directory(config, [address], kv_port=ports.take(), role="D")
        instance = InstanceAddress(stack.enter_context(directory).address)
        ids = np.arange(2, dtype=np.int64)
        for pull in (False, True):
            waiting = sender.receive(
                TransferKey(f"r{pull}"), HERE.sink(ids, 0, 8), peer=instance, pull=pull
            )
            check(waiting, what, values)
        source = HERE.source(ids, 0, 8)
        check(sender.send(TransferKey("s"), instance, source), what, values)
        assert sender.stats()["transfers_by_outcome"]["sent PeerRefused"] == 1
        # The receiver says it: what is here to the sender, is there to it.
        if not what.startswith(("heads that", "layers that", "a rank that")):
            greeted = PeerAddress(receiver.zmq_address)
            check(sender.send(TransferKey("h"), greeted, source), what, values)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("identity", [b"", digest_of(OTHER)], ids=["none", "a digest"])
def test_who_tells_no_fields_is_refused_at_once(identity: bytes) -> None:
    """A directory of protocol version 8 knows of no identity."""
    config, ids = settings("shm"), np.arange(2, dtype=np.int64)
    mine, theirs = (
        msgspec.structs.replace(HERE.spec, identity=each) for each in (digest_of({}), identity)
    )
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(P2pNcclEngine(config, spec=mine))
        rank = RankAddress(0, "127.0.0.1:1", 1, theirs, identity=b"")
        directory = stack.enter_context(Directory(config, [rank], kv_port=0, role="D"))
        sent = sender.send(
            TransferKey("r"), InstanceAddress(directory.address), HERE.source(ids, 0, 8)
        )
        with pytest.raises(PeerRefused, match=f"identity: '.+' here, '{identity.hex()}' there"):
            sent.wait(10)


def test_a_directory_says_which_fields_differ(caplog: pytest.LogCaptureFixture) -> None:
    """Both values are named, in the log once for a pair."""
    here, there = ({**OTHER, "dtype": dtype} for dtype in ("bfloat16", "float16"))
    config, ids = settings("shm"), np.arange(2, dtype=np.int64)
    specs = [msgspec.structs.replace(HERE.spec, identity=digest_of(each)) for each in (here, there)]
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(P2pNcclEngine(config, spec=specs[0], identity=here))
        receiver = stack.enter_context(P2pNcclEngine(config, spec=specs[1], identity=there))
        address = RankAddress(0, receiver.zmq_address, receiver.epoch, specs[1], pack(there))
        ports = stack.enter_context(contextlib.closing(PortPlan("127.0.0.1")))
        directory = Directory(config, [address], kv_port=ports.take(), role="D")
        instance = InstanceAddress(stack.enter_context(directory).address)
        said = "dtype: 'bfloat16' here, 'float16' there"
        for number in range(3):
            sent = sender.send(TransferKey(f"{number}"), instance, HERE.source(ids, 0, 8))
            with pytest.raises(PeerRefused, match=f": {said}$"):
                sent.wait(10)
        assert sender.stats()["refused_instances"] == {instance.address: said}
        assert_idle(sender, receiver)
    assert [each.levelname for each in caplog.records if said in each.message] == ["WARNING"]


def test_refusals_fill_no_log_however_many_there_are(caplog: pytest.LogCaptureFixture) -> None:
    """More peers than are remembered, or one that says something else each time. Each is logged
    once, when its turn comes."""
    clock = Clock(100.0)
    asking = locator.Locator(settings("shm"), Mock(), 1, HERE.spec, {}, clock)

    def meet(port: int, dtype: str = "bfloat16") -> None:
        instance = InstanceAddress(f"127.0.0.1:{port}")
        asking.ask(instance, lambda _: None)
        spec = msgspec.structs.replace(HERE.spec, dtype=dtype)
        asking.on_location(instance.address, Location(1, 1, 0, "", 1, spec))

    for _ in range(2):
        for port in range(1, 2 * locator.MAX_REFUSED):
            meet(port)
    for number in range(100):
        meet(1, f"dtype-{number}")
    assert len(caplog.messages) == 1
    for num_lines in (2, 2):
        clock.now += 10.0
        meet(7)
        assert len(caplog.messages) == num_lines
    assert "127.0.0.1:7" in caplog.messages[-1]


def test_a_refusal_that_nobody_meets_again_is_no_longer_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The instance may be gone for good. Else the log has it once, however often it is met."""
    config, ids = settings("shm"), np.arange(2, dtype=np.int64)
    spec = msgspec.structs.replace(HERE.spec, dtype="bfloat16")
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(P2pNcclEngine(config, spec=HERE.spec))
        rank = RankAddress(0, "127.0.0.1:1", 1, spec)
        directory = stack.enter_context(Directory(config, [rank], kv_port=0, role="D"))
        instance = InstanceAddress(directory.address)
        for seconds, shown in ((600.0, [instance.address]), (0.0, [])):
            monkeypatch.setattr(locator, "REFUSED_SECONDS", seconds)
            sent = sender.send(TransferKey(f"{seconds}"), instance, HERE.source(ids, 0, 8))
            with pytest.raises(PeerRefused):
                sent.wait(10)
            assert list(sender.stats()["refused_instances"]) == shown


def check(transfer: Any, what: str, values: list[object]) -> None:
    """The transfer ends by the documented error, long before its deadline."""
    with pytest.raises(PeerRefused) as raised:
        transfer.wait(10)
    found = says(raised.value, listed("HELLO")[what])
    assert found is not None, raised.value
    named = found.group()
    assert all(str(value) in named for value in values), named


@pytest.mark.parametrize(
    "what", ["heads that the ranks there cannot share", "layers that nobody there has",
             "a rank that cannot be"],
)  # fmt: skip
def test_a_peer_that_describes_the_impossible_is_refused_at_its_hello(what: str) -> None:
    """Its own description, which it does not doubt, comes with its HELLO."""
    (here, there), *values = UNLIKE[what]
    with P2pNcclEngine(settings("shm"), spec=here) as receiver:  # noqa: SIM117
        with P2pNcclEngine(settings("shm"), spec=there) as sender:
            source = HERE.source(np.arange(2), 0, 8)
            sent = sender.send(TransferKey("h"), PeerAddress(receiver.zmq_address), source)
            check(sent, what, values)


def test_another_protocol_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROTOCOL_VERSION", "OLDEST_VERSION"):  # of who is dialled
        monkeypatch.setattr(sessions, name, 99)
    with P2pNcclEngine(settings("shm")) as receiver, P2pNcclEngine(settings("shm")) as sender:
        sent = sender.send(
            TransferKey("h"), PeerAddress(receiver.zmq_address), HERE.source(np.arange(2), 0, 8)
        )
        check(sent, "another protocol version", [PROTOCOL_VERSION, 99])


def test_refusals_are_mutual_and_nobody_refuses_himself() -> None:
    for (here, there), *_ in UNLIKE.values():
        assert obstacles(here, there)
        assert not obstacles(here, here)


# At start


def set_in_vllm(**changes: Any) -> Callable[[], object]:
    """What an instance checks before it has a cache."""
    from p2p_engine.connector.support import check_supported
    from tests.doubles.start_config import configs

    return lambda: check_supported(configs(**changes)[0])


def with_groups(*specs: Any) -> Callable[[], object]:
    """What an instance checks of its kinds of cache."""
    from p2p_engine.connector.groups import attention_groups
    from tests.rigs.vllm_caches import config_of

    return lambda: attention_groups(config_of(*specs))


def at_start(what: str) -> tuple[Callable[[], object], list[object]]:
    """What provokes a row of the table, and what its error must name."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec

    from p2p_engine.connector.cache_spec import read_caches
    from p2p_engine.connector.host_buffer import make_host_buffer
    from p2p_engine.connector.layer_group import LayerGroup
    from p2p_engine.connector.spec_fields import check_fields
    from tests.rigs import host_buffers
    from tests.rigs import vllm_caches as caches

    def scattered() -> None:
        caches.read(caches.caches_of("LHBNC")[1], num_kv_heads=2 * caches.HEADS)

    def small_buffer() -> None:
        made = host_buffers.buffer_config("cpu", 25)
        make_host_buffer(made, host_buffers.handles(), 12, 3 * host_buffers.BLOCK_BYTES)

    def stateful_buffer() -> None:
        layers = host_buffers.handles()
        group = LayerGroup(0, tuple(layers), state, is_state=True, is_whole=True)
        config = host_buffers.buffer_config("cpu", 25)
        config.speculative_config = None
        read_caches(config, [group], layers, 12, 0, 100 * host_buffers.BLOCK_BYTES)

    def before_0_30() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("p2p_engine.connector.compat.HAS_FAILED_REQUESTS", False)
            with_groups(caches.SPEC, caches.WINDOW)()

    def sleepy(*, tells: bool = True, **changes: Any) -> Callable[[], None]:
        def start() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("p2p_engine.connector.compat.TELLS_OF_SLEEP", tells)
                set_in_vllm(enable_sleep_mode=True, **changes)()

        return start

    def in_no_group() -> None:
        caches.read_all(caches.caches_of("LBHNC")[1], caches.NAMES[:2])

    def placeless() -> None:
        [view, *_] = caches.caches_of("LBHNC")[1].values()
        caches.read_all({"odd0": view}, ["odd0"], pp_size=2)

    state = MambaSpec(shapes=((2, 2),) * 2, dtypes=(torch.float32,) * 2, block_size=16)
    speculative = dataclasses.replace(state, num_speculative_blocks=3)
    other = dataclasses.replace(state, mamba_type=MambaAttentionBackendEnum.LINEAR)
    scaled = dataclasses.replace(caches.SPEC, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    elsewhere = {"layers.0": torch.empty((caches.BLOCKS, 1, 1, 1), device="meta")}
    several = dataclasses.replace(caches.MLA, tokens_per_state=4)
    cases: dict[str, tuple[Callable[[], object], list[object]]] = {
        "a field of vLLM's that is not in [the list](cache.md)": (
            lambda: check_fields(caches.FUTURE), ["FutureSpec.swizzle"],
        ),
        "rows of several tokens, caches of DeepSeek-V4, blocks that are not vLLM's": (
            with_groups(several), ["MLAAttentionSpec.tokens_per_state=4", 1],
        ),
        "states beside speculation, in the mode `all`, or equal on all ranks": (
            with_groups(caches.SPEC, speculative), ["MambaSpec.num_speculative_blocks=3", 0],
        ),
        "a state of linear attention, or of a kind that is not known": (
            with_groups(caches.SPEC, other), ["LINEAR"],
        ),
        "states and a host buffer": (stateful_buffer, []),
        "attention that looks back in chunks": (with_groups(caches.CHUNKED), []),
        "a model that keeps no KV cache": (with_groups(), []),
        "several groups, a window, or a state, in vLLM 0.29": (before_0_30, []),
        "a layer whose group is not known": (in_no_group, ["layers.2"]),
        "pipeline stages of layers that do not say where they are": (placeless, ["odd0"]),
        "scales of their own beside the values": (with_groups(scaled), ["INT8_PER_TOKEN_HEAD"]),
        "a cache that is on neither CPU nor GPU, without a host buffer": (
            lambda: caches.read(elsewhere), ["meta"],
        ),
        "a host buffer that is too small": (small_buffer, [3, 4]),
        "blocks whose bytes are scattered and not known": (scattered, ["layers.0"]),
        "a cache that is not made of vLLM's blocks": (
            lambda: caches.read(caches.caches_of("LBHNC")[1], 3), [10, 3],
        ),
        "decode context parallelism": (set_in_vllm(decode_context_parallel_size=2), [2]),
        "prefill context parallelism": (set_in_vllm(prefill_context_parallel_size=2), [2]),
        "[sleep mode](sleep.md) before vLLM 0.33": (sleepy(tells=False), []),
        "another backend of sleep mode": (sleepy(sleep_mode_backend="criu"), ["criu"]),
        "the experts of each token, where KV is loaded": (
            set_in_vllm(enable_return_routed_experts=True), [],
        ),
        "elastic expert parallelism": (set_in_vllm(enable_elastic_ep=True), []),
        "fault tolerance of vLLM's": (set_in_vllm(enable_fault_tolerance=True), []),
    }  # fmt: skip
    return cases[what]


@pytest.mark.parametrize("what", listed("start"))
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_at_start_it_is_named(what: str) -> None:
    pytest.importorskip("vllm")
    provoke, values = at_start(what)
    with pytest.raises(ConfigError) as raised:
        provoke()
    found = says(raised.value, listed("start")[what])
    assert found is not None, raised.value
    assert all(str(value) in found.group() for value in values), found.group()


def test_the_documents_list_what_is_tested_at_hello() -> None:
    assert set(listed("HELLO")) == {*UNLIKE, "another protocol version"}
