"""Whole applications of Ray Serve LLM on this machine's CPU: replicas of vLLM with our backend."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray makes an environment with Ray")

import psutil  # type: ignore[import-untyped]
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app, build_pd_openai_app

from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.integrations.ray_serve import register
from p2p_engine.transfer_config import CONNECTOR, EXTRA
from tests import marks
from tests.ports import free_port
from tests.support import eventually

HOST = "127.0.0.1"
MODEL = "tiny"
BOOT_SECONDS = 1200.0
ASK_SECONDS = 300.0
NUM_PROMPTS = 100
CONCURRENCY = 4
# What is at most in flight on a replica that is killed, and what has been sent there meanwhile.
MOST_LOST = 3 * CONCURRENCY

pytestmark = [marks.slow, pytest.mark.timeout(3 * BOOT_SECONDS)]
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def prompts(count: int = NUM_PROMPTS, seed: int = 1) -> list[list[int]]:
    """Prompts of 2 to 400 tokens."""
    source = random.Random(seed)
    return [
        [source.randrange(5, 900) for _ in range(source.randrange(2, 400))] for _ in range(count)
    ]


def config(replicas: int, *, is_alone: bool = False) -> LLMConfig:
    """One role's deployment; a decode replica answers how many tokens of a prompt it did not
    compute, and computes no prompt from its own cache."""
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", EXTRA: {"host": HOST}}
    engine: dict[str, Any] = {
        "dtype": "float32", "block_size": 32, "enforce_eager": True, "max_model_len": 2048,
        "enable_prefix_caching": False, "enable_prompt_tokens_details": True,
    }  # fmt: skip
    if not is_alone:
        engine["kv_transfer_config"] = transfer
    return LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(ensure_tiny_model())},
        accelerator_config={"kind": "cpu"},
        deployment_config={
            "autoscaling_config": {"min_replicas": replicas, "max_replicas": replicas},
            "ray_actor_options": {},
            "max_ongoing_requests": 64,
        },
        runtime_env={
            "env_vars": {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_HOST_IP": HOST,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
        },
        engine_kwargs=engine,
    )


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer, and how many of the prompt's were not computed there."""

    token_ids: tuple[int, ...]
    num_loaded: int


@dataclass
class Cluster:
    """Ray on this machine, and the one application on it."""

    port: int
    lost: list[str] = field(default_factory=list)

    def run(self, application: Any) -> None:
        """Start an application, or change the one that runs; blocks until it serves."""
        serve.run(application, name="app", route_prefix="/", blocking=False)

        def is_running() -> bool:
            return str(serve.status().applications["app"].status.value) == "RUNNING"

        wait_until(is_running, "the application runs")

    def ask(self, prompt: list[int]) -> Answered:
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _direct.open(request, timeout=ASK_SECONDS) as response:
            answer = json.load(response)
        details = answer["usage"].get("prompt_tokens_details") or {}
        tokens = tuple(answer["choices"][0]["token_ids"])
        return Answered(tokens, details.get("cached_tokens") or 0)

    def ask_all(self, asked: list[list[int]]) -> list[Answered]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self.ask, asked))

    @contextlib.contextmanager
    def under_load(
        self, right: dict[int, tuple[int, ...]], asked: list[list[int]]
    ) -> Iterator[Any]:
        """Ask the same again and again meanwhile, and compare; `lost` has what failed."""
        is_over = threading.Event()

        def go_on(first: int) -> int:
            number = first
            while not is_over.is_set():
                index, number = number % len(asked), number + CONCURRENCY
                try:
                    answer = self.ask(asked[index])
                except OSError as error:
                    self.lost.append(repr(error))
                else:
                    assert answer.token_ids == right[index]
            return (number - first) // CONCURRENCY

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            loads = [pool.submit(go_on, first) for first in range(CONCURRENCY)]
            try:
                yield
            finally:
                is_over.set()
            assert all(load.result() > 0 for load in loads)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it is so; asked seldom, because asking costs the replicas something."""
    pause = threading.Event()
    eventually(lambda: condition() or pause.wait(0.2), BOOT_SECONDS, what)


def replicas(part: str) -> list[psutil.Process]:
    """The processes of our replicas whose title has this part."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in (title := " ".join(child.cmdline())) and part in title:
                found.append(child)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray")  # its sockets need a short name
    ray.init(num_cpus=32, include_dashboard=False, _temp_dir=folder)
    port = free_port()
    serve.start(http_options={"host": HOST, "port": port, "request_timeout_s": ASK_SECONDS})
    register()
    try:
        yield Cluster(port)
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def right(cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """The tokens of one instance."""
    cluster.run(build_openai_app({"llm_configs": [config(1, is_alone=True)]}))
    answers = cluster.ask_all(prompts())
    serve.delete("app")
    return {number: answer.token_ids for number, answer in enumerate(answers)}


def pair_of(num_prefill: int, num_decode: int) -> Any:
    return build_pd_openai_app(
        {"prefill_config": config(num_prefill), "decode_config": config(num_decode)}
    )


def check(cluster: Cluster, right: dict[int, tuple[int, ...]]) -> None:
    """Every token is right, and decode computed the last token of each prompt only."""
    asked = prompts()
    for number, (prompt, answer) in enumerate(zip(asked, cluster.ask_all(asked), strict=True)):
        assert answer.token_ids == right[number]
        assert answer.num_loaded >= len(prompt) - 1


@pytest.mark.parametrize("num", [1, 2], ids=["1P1D", "2P2D"])
def test_kv_moves_and_tokens_are_right(
    cluster: Cluster, right: dict[int, tuple[int, ...]], num: int
) -> None:
    cluster.run(pair_of(num, num))
    check(cluster, right)


def test_a_replica_is_killed_and_one_is_added_under_load(
    cluster: Cluster, right: dict[int, tuple[int, ...]]
) -> None:
    """Ray starts the killed one again; what was in flight on it is lost, and nothing else."""
    cluster.run(pair_of(2, 1))
    with cluster.under_load(right, prompts()):
        killed = replicas("Prefill")[0]
        before = len(cluster.lost)
        killed.kill()
        wait_until(lambda: len(replicas("Prefill")) == 2, "Ray starts another one")
        cluster.run(pair_of(2, 1))
        num_lost = len(cluster.lost) - before
        cluster.run(pair_of(2, 2))
        assert len(cluster.lost) == before + num_lost
    assert num_lost <= MOST_LOST
    check(cluster, right)
