"""No request is two, and none is part of another: the corpus of `tests/hostile/requests.py`."""

from __future__ import annotations

import pytest

from tests.hostile import requests
from tests.hostile.requests import FIRST, SECOND, SMUGGLED
from tests.rigs.desync import ask, wrong_outcomes
from tests.rigs.recorded import recorded

pytestmark = pytest.mark.usefixtures("crowd")

GROUPS = {
    name: getattr(requests, name)
    for name in (
        "LENGTHS", "ENCODINGS", "CHUNKS", "LINES", "VERSIONS", "TARGETS", "OTHER_PROTOCOLS",
        "EARLY",
    )
}  # fmt: skip
# How some of the requests of a group are counted.
REASONS = {"LENGTHS": "syntax", "ENCODINGS": "encoding", "VERSIONS": "version", "CHUNKS": "syntax"}


@pytest.mark.parametrize("group", GROUPS)
async def test_each_request_has_one_answer_or_ends_its_connection(group: str) -> None:
    prompts = set()
    async with recorded() as (proxy, prefill, decode):
        for name, attack in GROUPS[group].items():
            assert await wrong_outcomes(proxy.port, {name: attack}) == {}
            prompts.add(prompt := f"after {name}")
            answer = await ask(proxy.port, prompt)
            assert answer is not None
            assert (answer.status, prompt in answer.body.decode()) == (200, True), name
            seen = repr([*prefill.received, *decode.received])
            assert SMUGGLED not in seen, name
        if group in REASONS:
            name = f'p2p_proxy_refused_requests_total{{reason="{REASONS[group]}"}}'
            assert (await proxy.metrics())[name] > 0
        assert (prefill.faults, decode.faults) == ([], [])
        assert {each.json["prompt"] for each in prefill.received} <= {FIRST, SECOND, *prompts}
        await proxy.until_idle()
