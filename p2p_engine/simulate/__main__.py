"""One stand-in: `python -m p2p_engine.simulate --port 8100 --kv-transfer-config JSON`."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal

import uvloop

from p2p_engine.config import EngineConfig
from p2p_engine.simulate.cost import CostModel
from p2p_engine.simulate.instance import StandIn
from p2p_engine.simulate.prompts import MadeUpModel
from p2p_engine.transfer_config import extra_of, our_config

ROLES = {"kv_producer": "P", "kv_consumer": "D", "kv_both": "PD"}
_MILLISECOND = 0.001


def parser() -> argparse.ArgumentParser:
    """Return the options of an instance, and the cost of its tokens."""
    cost = CostModel()
    options = argparse.ArgumentParser("python -m p2p_engine.simulate", description=__doc__)
    options.add_argument("--model", default="simulated", help="the name that it serves")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--kv-transfer-config", type=json.loads, required=True)
    options.add_argument("--shutdown-timeout", type=float, default=12.0, help="seconds")
    options.add_argument(
        "--prefill-tokens-per-second", type=float, default=cost.prefill_tokens_per_second,
        help="0: prompts take no time (%(default)g)",
    )  # fmt: skip
    options.add_argument(
        "--token-ms", type=float, default=cost.step_seconds / _MILLISECOND,
        help="one decoding step of one request (%(default)g)",
    )  # fmt: skip
    options.add_argument(
        "--token-ms-per-request", type=float, default=cost.step_seconds_per_request / _MILLISECOND,
        help="time that each other request adds to it (%(default)g)",
    )  # fmt: skip
    options.add_argument("--kv-bytes-per-token", type=int, default=1024, help="(%(default)d)")
    return options


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal comes, or a fault, then leave in good order.

    Raises:
        Exception: the fault.
    """
    transfer_config = our_config(options.kv_transfer_config)
    config = EngineConfig.from_extra_config(extra_of(transfer_config))
    instance = StandIn(
        config,
        ROLES[transfer_config["kv_role"]],
        int(transfer_config["kv_port"]),
        MadeUpModel(options.model, kv_bytes_per_token=options.kv_bytes_per_token),
        CostModel(
            options.prefill_tokens_per_second,
            options.token_ms * _MILLISECOND,
            options.token_ms_per_request * _MILLISECOND,
        ),
    )
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await instance.start(options.host, options.port)
    ends = [asyncio.ensure_future(told.wait()), asyncio.ensure_future(instance.broken())]
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await instance.leave(options.shutdown_timeout)
    for end in done:
        end.result()


if __name__ == "__main__":
    uvloop.run(serve(parser().parse_args()))
