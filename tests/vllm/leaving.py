"""Clients that ask an instance directly, and leave before they have their answer."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.wire.request_ids import ProxyId, new_transfer_id
from tests.compat.workload import Question
from tests.support import eventually
from tests.vllm.load import check_nothing_held, decodes
from tests.vllm.observing import by_label

LONG = 1900  # tokens; with 64 in a step, a prefill of 30 steps
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
SECONDS = 30.0


def new_request_id(prefill: Member, decode: Member) -> str:
    """Return an id of the old scheme that names both."""
    addresses = [member.plan.kv_address for member in (prefill, decode) if member.plan]
    return str(ProxyId(addresses[0], addresses[1], new_transfer_id()))


def question_of(length: int, seed: int, **more: Any) -> Question:
    """Return a completion of one random prompt."""
    source = random.Random(seed)
    body = {
        "model": str(ensure_tiny_model()),
        "prompt": [source.randrange(5, 900) for _ in range(length)],
        "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return Question("/v1/completions", {**body, **more})


def leave_early(
    member: Member, question: Question, request_id: str = ""
) -> http.client.HTTPConnection:
    """Ask, and return the connection without waiting: closing it is how a client leaves."""
    connection = http.client.HTTPConnection(member.http_address, timeout=60)
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    connection.request("POST", question.path, json.dumps(question.body), headers)
    return connection


def num_requests(member: Member, *names: str) -> int:
    """How many requests an instance has, in all or in these states."""
    return sum(sum(by_label(member, name, "").values()) for name in names or (RUNNING, WAITING))


def check_at_rest(members: Sequence[Member]) -> None:
    """Nobody has a request, and nothing is held anywhere."""
    for member in members:
        eventually(lambda m=member: not num_requests(m), SECONDS, f"{member.name} has none")  # type: ignore[misc]
    check_nothing_held(members)


def leave_at_each_stage(proxy: Member, members: Sequence[Member]) -> None:
    """Leave while queued, while prefill runs, while KV comes, and while tokens do; nothing stays.

    Prefill takes few tokens at a time, and nobody else asks.
    """
    decode = decodes(members)[0]
    prefill = next(member for member in members if member not in decodes(members))
    for leave in (
        partial(leave_prefill, prefill, decode),
        partial(leave_decode_while_kv_comes, prefill, decode),
        partial(leave_while_tokens_come, proxy, decodes(members)),
    ):
        leave()
        check_at_rest(members)


def leave_prefill(prefill: Member, decode: Member) -> None:
    """Three ask: the last one leaves the queue, then the others leave in the middle."""
    clients = [
        leave_early(prefill, question_of(LONG, seed), new_request_id(prefill, decode))
        for seed in range(3)
    ]
    eventually(lambda: num_requests(prefill) == 3, SECONDS, "all are there")
    assert num_requests(prefill, WAITING)
    clients.pop().close()
    eventually(lambda: num_requests(prefill) < 3, SECONDS, "the queue is shorter")
    for client in clients:
        client.close()


def leave_decode_while_kv_comes(prefill: Member, decode: Member) -> None:
    """Decode's client leaves when the first chunks are there; prefill's has its answer."""
    request_id = new_request_id(prefill, decode)
    waiting = leave_early(decode, question_of(LONG, 3), request_id)
    eventually(lambda: num_requests(decode) == 1, SECONDS, "decode waits")
    sending = leave_early(prefill, question_of(LONG, 3, max_tokens=1), request_id)
    eventually(lambda: num_requests(prefill, RUNNING) == 1, SECONDS, "prefill runs")
    waiting.close()
    eventually(lambda: not num_requests(decode), SECONDS, "decode lets go")
    assert sending.getresponse().status == 200
    sending.close()


def leave_while_tokens_come(proxy: Member, decoding: Sequence[Member]) -> None:
    """The first piece of a long stream is enough for this one."""
    client = leave_early(proxy, question_of(40, 4, max_tokens=1500, stream=True))
    answer = client.getresponse()
    assert answer.readline().startswith(b"data: ")
    eventually(lambda: sum(num_requests(member, RUNNING) for member in decoding) == 1, SECONDS)
    answer.close()
    client.close()
