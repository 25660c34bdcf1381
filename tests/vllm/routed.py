"""Does to real vLLM what a router does with a client's request."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from p2p_engine.cli.members import Member
from tests.compat.workload import Answer, Question
from tests.doubles.routers import Json, LlmdSidecar, Served

SECONDS = 120.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def play(router: LlmdSidecar, question: Question) -> tuple[Json | None, Answer]:
    """Do with a client's request what the router does; what prefill answered, decode's tokens."""
    body = dict(question.body)

    def ask_decode(answer: Json | None) -> Json:
        url = router.decode.http_address + question.path
        return post(url, router.decode_body(body, answer), router.headers)

    def ask_prefill() -> Json:
        url = router.prefill.http_address + question.path
        answer = post(url, router.prefill_body(body), router.headers)
        router.take_answer(answer.get("kv_transfer_params"))
        return answer

    if router.is_concurrent:
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(ask_decode, None)
            first, second = ask_prefill(), later.result(SECONDS)
    else:
        first = ask_prefill()
        second = ask_decode(first)
    tokens = {choice["index"]: choice["token_ids"] for choice in second["choices"]}
    return first.get("kv_transfer_params"), tokens


def post(address: str, body: Json, headers: dict[str, str]) -> Json:
    """Ask an instance at host:port/path; its answer."""
    request = urllib.request.Request(
        f"http://{address}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    with _direct.open(request, timeout=SECONDS) as response:
        answer: Json = json.loads(response.read())
    return answer


def served(member: Member) -> Served:
    """The addresses that a router has of an instance."""
    assert member.plan is not None
    return Served(member.http_address, member.plan.kv_address)
