"""Each data-parallel way of vLLM: where a rank is asked over HTTP, and under which number.

vLLM's own argument parsing and the first lines of its engine core say what a rank is told.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers import dp_supervisor
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import core

from p2p_engine.cli.commands import InstancePlan, MemberRole, events_config
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.config import EngineConfig
from p2p_engine.connector import serving
from p2p_engine.connector.publisher import find_publisher
from p2p_engine.connector.support import num_local_ranks
from p2p_engine.wire.messages import Publisher
from tests.doubles import supervisor
from tests.support import records_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.timeout(400),  # the first one waits until vLLM has looked at the model's class
]
PROXY = {"proxy_ip": "10.0.0.1", "proxy_port": 30001}
CONFIG = EngineConfig(host="10.0.0.7", http_port=8000, **PROXY)  # type: ignore[arg-type]
TRANSFER = json.dumps({"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"})
LOCAL = "--data-parallel-size-local=2"
MASTER = "--data-parallel-address=10.0.0.9"
START = "--data-parallel-start-rank=2"
EVENTS = "--kv-events-config=" + json.dumps({
    "enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557",
    "topic": "kv",
})  # fmt: skip
NODES = ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.9")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Llama, and the same with experts, of which there is the configuration alone."""
    dense, experts = Path(ensure_tiny_model()), tmp_path_factory.mktemp("experts")
    for path in dense.glob("*token*"):
        (experts / path.name).write_bytes(path.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    (experts / "config.json").write_text(json.dumps(config))
    return {"dense": dense, "experts": experts}


@pytest.fixture
def signals() -> Iterator[None]:
    """vLLM's engine core takes them, and gives back the default."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


Start = Callable[..., Any]  # (model, arguments, (rank, rank on this host), headless)


@pytest.fixture
def start(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, signals: None) -> Start:
    """Start vLLM's engine core as `vllm serve` does, up to where it makes the engine."""

    class IdleEngine:
        def __init__(self, *, vllm_config: Any, engine_index: int = 0) -> None:
            self.vllm_config = made[0] = vllm_config

        def run_busy_loop(self) -> None:
            """Nothing to do."""

        shutdown = run_busy_loop

    made: list[Any] = [None]
    run = core.EngineCoreProc.run_engine_core
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        monkeypatch.setattr(core, name, IdleEngine)
    for name in ("decorate_logs", "set_process_title"):
        monkeypatch.setattr(core, name, lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(
        model: str, arguments: tuple[str, ...], ranks: tuple[int, int], headless: bool = False
    ) -> Any:
        parsed = parse(models[model], *arguments)
        made_config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(headless=headless)
        run(vllm_config=made_config, dp_rank=ranks[0], local_dp_rank=ranks[1])
        return made[0]

    return start


def parse(model: Path, *arguments: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    own = ["--model", str(model), "--dtype=float32", "--kv-transfer-config", TRANSFER]
    return parser.parse_args([*own, *arguments])


def server_of(vllm_config: Any, config: EngineConfig = CONFIG) -> tuple[str, int | None]:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    server = serving.find_server(parallel, transfer, config)
    return server.address(), server.rank


@pytest.mark.parametrize(
    ("arguments", "ranks", "is_headless", "address", "rank"),
    [
        pytest.param((), (0, 0), False, "10.0.0.7", None, id="none"),
        pytest.param(("-dp=2",), (0, 0), False, "10.0.0.7", 0, id="internal, first"),
        pytest.param(("-dp=2",), (1, 1), False, "10.0.0.7", 1, id="internal, second"),
        pytest.param(("-dp=4", LOCAL, MASTER), (1, 1), False, "10.0.0.9", 1, id="internal, head"),
        pytest.param(("-dp=4", LOCAL, MASTER, START), (3, 1), True, "10.0.0.9", 3, id="headless"),
        pytest.param(("-dp=4", LOCAL, MASTER), (0, 0), True, "10.0.0.9", 0, id="headless, first"),
        pytest.param(("-dp=4", *NODES), (2, 0), True, "10.0.0.9", 2, id="headless, by node"),
        pytest.param(
            ("-dp=4", LOCAL, MASTER, START, "--data-parallel-hybrid-lb"), (3, 1), False,
            "10.0.0.7", 1, id="hybrid",
        ),
        pytest.param(
            ("-dp=4", LOCAL, MASTER, START), (2, 0), False, "10.0.0.7", 0, id="hybrid, by start"
        ),
        pytest.param(
            ("-dp=2", LOCAL, "--data-parallel-hybrid-lb"), (1, 1), False,
            "10.0.0.7", 1, id="hybrid of one host is internal",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_rank_is_registered_where_its_server_is(
    start: Start,
    model: str,
    arguments: tuple[str, ...],
    ranks: tuple[int, int],
    is_headless: bool,
    address: str,
    rank: int | None,
) -> None:
    vllm_config = start(model, arguments, ranks, is_headless)
    assert server_of(vllm_config) == (f"{address}:8000", rank)
    chosen = EngineConfig(host="10.0.0.7", http_host="lb", http_port=9, **PROXY)  # type: ignore[arg-type]
    assert server_of(vllm_config, chosen) == ("lb:9", rank)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--data-parallel-rank=1", MASTER), id="by rank"),
        pytest.param(("--data-parallel-external-lb", *NODES), id="by node"),
        pytest.param(
            ("--data-parallel-hybrid-lb", "--data-parallel-size-local=1",
             "--data-parallel-start-rank=1"), id="a hybrid of one rank",
        ),
    ],
)  # fmt: skip
def test_with_an_external_balancer_each_rank_has_a_server(
    start: Start, arguments: tuple[str, ...]
) -> None:
    """vLLM refuses it for dense models."""
    vllm_config = start("experts", ("-dp=2", *arguments), (1, 0))
    assert server_of(vllm_config) == ("10.0.0.7:8000", None)


def test_ranks_that_ray_starts_are_behind_the_server_of_its_head() -> None:
    """Its actors of a dense model are told of no other rank than their own."""
    for index in (0, 1):
        parallel = SimpleNamespace(
            data_parallel_size=1, data_parallel_index=index, data_parallel_backend="ray",
            data_parallel_external_lb=False, data_parallel_hybrid_lb=False,
            data_parallel_master_ip="10.0.0.9",
        )  # fmt: skip
        made = SimpleNamespace(
            parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id="e")
        )
        assert server_of(made) == ("10.0.0.9:8000", index)


def test_a_supervised_rank_is_registered_at_the_port_that_vllm_gives_it(
    start: Start, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --data-parallel-multi-port-external-lb the ranks of a host have a port each."""
    words = ("-dp=4", LOCAL, START, MASTER, "--data-parallel-multi-port-external-lb")
    args = parse(models["experts"], *words)
    args.port, args.data_parallel_supervisor_port = 8000, 9256
    for local_rank in (0, 1):
        child = dp_supervisor._build_vllm_dp_server_args(copy.copy(args), local_rank)
        number = child.data_parallel_rank
        parent = SimpleNamespace(name=f"APIServer_DPRank_{number}", pid=1)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda parent=parent: parent)
        listening = {9256, 29550}
        monkeypatch.setattr(serving, "_listening_ports", lambda listening=listening: listening)
        rank = f"--data-parallel-rank={number}"
        vllm_config = start("experts", ("-dp=4", MASTER, rank), (number, 0))
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        server = serving.find_server(parallel, transfer, CONFIG)
        assert server.address() == ""
        listening.add(child.port)
        assert server.address() == f"10.0.0.7:{8000 + local_rank}"
        assert server.rank is None
        assert num_local_ranks(parallel) == 4  # at most


@pytest.mark.parametrize(
    ("arguments", "ranks", "publisher"),
    [
        pytest.param((), (0, 0), None, id="no events"),
        pytest.param((EVENTS,), (0, 0), Publisher(5557, 6557, "kv"), id="one rank"),
        pytest.param(("-dp=2", EVENTS), (1, 1), Publisher(5558, 6558, "kv"), id="second rank"),
        pytest.param(
            ("-dp=4", LOCAL, MASTER, START, "--data-parallel-hybrid-lb", EVENTS), (3, 1),
            Publisher(5560, 6560, "kv"), id="on another host",
        ),
    ],
)  # fmt: skip
def test_where_a_rank_publishes_its_events(
    start: Start, arguments: tuple[str, ...], ranks: tuple[int, int], publisher: Publisher | None
) -> None:
    config = start("dense", arguments, ranks)
    assert find_publisher(config) == publisher


def test_the_events_of_a_fleet_are_found() -> None:
    plan = InstancePlan(
        "p", MemberRole.PREFILL, "tiny", "10.0.0.7", 1, events_port=5557, replay_port=6557
    )
    config = SimpleNamespace(
        kv_events_config=KVEventsConfig(**events_config(plan)),
        parallel_config=SimpleNamespace(data_parallel_index=1),
    )
    assert find_publisher(config) == Publisher(5558, 6558)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "publisher"),
    [
        ({}, Publisher(5557)),
        ({"endpoint": "tcp://[::]:5557"}, Publisher(5557)),
        ({"replay_endpoint": "tcp://127.0.0.1:6557"}, Publisher(5557, 6557)),
        ({"replay_endpoint": "ipc:///tmp/x"}, Publisher(5557)),
        ({"enable_kv_cache_events": False}, None),
        ({"publisher": "null"}, None),
        ({"endpoint": "tcp://collector:5557"}, None),  # vLLM dials it
        ({"endpoint": "tcp://*:0"}, None),  # nobody tells the port
        ({"endpoint": "tcp://*:99999"}, None),
        ({"endpoint": "ipc://*"}, None),
        ({"topic": "x" * 600}, None),
    ],
)
def test_events_that_nobody_can_subscribe_to(
    changed: dict[str, Any], publisher: Publisher | None
) -> None:
    settings = {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": ""}
    on = {"enable_kv_cache_events": True, "publisher": "zmq"}
    config = SimpleNamespace(
        kv_events_config=SimpleNamespace(**settings | on | changed),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    assert find_publisher(config) == publisher  # type: ignore[arg-type]


def neighbour_of_a_free_port() -> socket.socket:
    """Listen on a port of which the third next is free."""
    while True:
        neighbour = socket.create_server(("127.0.0.1", 0))
        try:
            socket.create_server(("127.0.0.1", neighbour.getsockname()[1] + 3)).close()
        except OSError:
            neighbour.close()
        else:
            return neighbour


def test_the_port_is_the_one_on_which_the_process_that_started_us_listens() -> None:
    """A neighbour's, which is in the range too, is not."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    name = "APIServer_DPRank_5"
    with neighbour_of_a_free_port() as neighbour:
        port = neighbour.getsockname()[1]
        arguments = ([port, port + 3], results)
        parent = context.Process(target=supervisor.serve, args=arguments, name=name)
        parent.start()
        assert results.get(timeout=supervisor.SECONDS) == (5, "", f"h:{port + 3}")
        parent.join(supervisor.SECONDS)


def test_a_supervised_rank_whose_server_is_not_found_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for listening in (set(), {8000, 8001}):
        monkeypatch.setattr(serving, "_listening_ports", lambda listening=listening: listening)
        server = serving.SupervisedServer("h", 8000, 1)
        assert {server.address() for _ in range(100)} == {""}
    assert len(records_of(serving.logger, caplog)) == 2
    assert "not registered: of the ports 8000 to 8001" in caplog.text
