"""How much of a transfer `layerwise` hides, on real vLLM behind a slow link and behind a fast one.

Two prefill instances, with and without `layerwise`, and one decode instance, in a network namespace
of their own whose loopback device `tc tbf` limits. They take turns, prompt by prompt; HTTP goes
over Unix sockets, beside the link. A prompt fits one step. Decode is asked as soon as prefill has
answered, for one token, which must be prefill's.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, alternate, arguments, progress, record, spread
from benchmarks.processes import enter_own_network
from benchmarks.vllm_servers import BYTES_PER_TOKEN, MODEL, OneCoreServer, p2p_settings
from p2p_engine.cli.tiny_model import ensure_tiny_model


def limit(gbit_per_second: float) -> None:
    """Limit the loopback device; 0: not at all. The queue is long enough to lose nothing."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True, check=False)
    if gbit_per_second:
        rate = f"{gbit_per_second:g}gbit"
        command = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms"
        subprocess.run(command.split(), check=True)


def measure(
    prefill: OneCoreServer, decode: OneCoreServer, prompt: list[int]
) -> tuple[float, float]:
    """Return the seconds of both legs, one after the other.

    Raises:
        RuntimeError: decode's token is not prefill's.
    """
    name = uuid.uuid4().hex
    common = {"transfer_id": name, "remote_host": "127.0.0.1", "send_type": "PUT_ASYNC"}
    to = {"do_remote_decode": True, "do_remote_prefill": False, "remote_port": decode.kv_port}
    start = time.perf_counter()
    token = prefill.ask(prompt, {**common, **to})
    middle = time.perf_counter()
    of = {"do_remote_prefill": True, "do_remote_decode": False, "remote_port": prefill.kv_port}
    if decode.ask(prompt, {**common, **of}) != token:
        raise RuntimeError("decode's first token is not prefill's")
    return middle - start, time.perf_counter() - middle


@contextlib.contextmanager
def servers(
    folder: Path, transport: str
) -> Iterator[tuple[dict[bool, OneCoreServer], OneCoreServer]]:
    """Start the instances, one after the other: the cores are few."""
    with contextlib.ExitStack() as stack:

        def start(name: str, core: int, role: str, kv_port: int, **extra: Any) -> OneCoreServer:
            progress(f"starting {name}")
            settings = p2p_settings(role, kv_port, transports=transport, **extra)
            arguments = ["--no-enable-prefix-caching"]
            server = OneCoreServer(name, folder, core, settings, arguments=arguments)
            stack.callback(server.close)
            server.wait()
            return server

        prefill = {
            by_layer: start(
                f"prefill-{by_layer}", 0, "kv_producer", 21000 + 100 * by_layer, layerwise=by_layer
            )
            for by_layer in (False, True)
        }  # fmt: skip
        yield prefill, start("decode", 1, "kv_consumer", 21500)


def main() -> None:
    """Run the benchmark, in a network namespace of its own."""
    parser = arguments("layerwise", __doc__, repetitions=7)
    parser.add_argument("--tokens", type=int, default=3000, help="of a prompt (%(default)s)")
    parser.add_argument("--transport", default="tcp", help="tcp or shm (%(default)s)")
    parser.add_argument(
        "--gbit", type=float, nargs="+", default=[1.0, 0.0], help="of the link; 0: not limited"
    )
    options = parser.parse_args()
    ensure_tiny_model(MODEL)
    enter_own_network("benchmarks.bench_layerwise")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rng = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="bench-layerwise-"))
    with servers(folder, options.transport) as (prefill, decode):
        rows = [row for gbit in options.gbit for row in play(options, rng, prefill, decode, gbit)]
    record(rows, options)


def play(
    options: Any,
    rng: random.Random,
    prefill: dict[bool, OneCoreServer],
    decode: OneCoreServer,
    gbit: float,
) -> list[Row]:
    """Measure both prefill instances over a link of this rate."""
    limit(gbit)
    legs: dict[bool, list[tuple[float, float]]] = {by_layer: [] for by_layer in prefill}

    def runner(by_layer: bool) -> Callable[[], float]:
        def run() -> float:
            prompt = [rng.randrange(2, 900) for _ in range(options.tokens)]
            legs[by_layer].append(measure(prefill[by_layer], decode, prompt))
            progress(f"{gbit:g} Gb/s, layerwise {by_layer}: {legs[by_layer][-1]}")
            return sum(legs[by_layer][-1])

        return run

    alternate({by_layer: runner(by_layer) for by_layer in prefill}, options.repetitions)
    nbytes = options.tokens * BYTES_PER_TOKEN
    rows = []
    for by_layer, samples in legs.items():
        first, second = zip(*samples[1:], strict=True)  # the first round is a warm-up
        row: Row = {
            "gbit_per_second": gbit, "layerwise": by_layer, "tokens": options.tokens,
            "mbytes": round(nbytes / 1e6, 1),
            **spread([1e3 * item for item in first], "prefill_ms_", 0),
            **spread([1e3 * item for item in second], "decode_ms_", 0),
            **spread([1e3 * sum(item) for item in samples[1:]], "first_token_ms_", 0),
        }  # fmt: skip
        if gbit:  # all of decode's leg counts as not hidden
            on_link = nbytes * 8 / (gbit * 1e9)
            hidden = [max(0.0, 1 - item / on_link) for item in second]
            row |= {"on_link_ms": round(1e3 * on_link), **spread(hidden, "hidden_", 2)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
