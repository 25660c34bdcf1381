"""What routers send, and what a prefill and a decode instance of ours make of it.

Both take part in one transfer, or neither does: decode never waits for KV that nobody was told to
send to it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from p2p_engine.config import SendMode
from p2p_engine.connector.intent import Direction, Intent, InvalidParams, ThisInstance, read_intent
from p2p_engine.connector.scheduler import SchedulerHalf
from p2p_engine.connector.weights import Weights
from tests.doubles.routers import (
    AibrixNixl,
    AibrixShfs,
    DynamoNixl,
    LlmdCoordinator,
    LlmdMooncake,
    LlmdMoriio,
    LlmdMoriioAtOnce,
    LlmdNextTurn,
    LlmdNixlPush,
    LlmdSidecar,
    ProductionStack,
    ProductionStackPassingIds,
    RayServeDefault,
    Served,
    SmgMooncake,
    SmgMoriio,
    SmgMoriioAtOnce,
    SmgNixl,
    SmgUnlabelled,
    VllmRouterAtUrls,
    VllmRouterDiscovery,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

P = Served("10.0.1.2:8000", "10.0.1.2:21001")
D = Served("10.0.1.3:8000", "10.0.1.3:22001")
ROUTERS: dict[type[LlmdSidecar], str] = {
    LlmdSidecar: "pull",
    LlmdCoordinator: "pull",
    LlmdNixlPush: "pull",
    LlmdNextTurn: "pull",
    LlmdMoriio: "push",
    LlmdMoriioAtOnce: "push",
    LlmdMooncake: "refused by decode",
    VllmRouterAtUrls: "pull",
    VllmRouterDiscovery: "push",
    ProductionStack: "pull",
    ProductionStackPassingIds: "pull",
    AibrixShfs: "pull",
    AibrixNixl: "not transferred",
    SmgNixl: "pull",
    SmgUnlabelled: "not transferred",
    SmgMoriio: "push",
    SmgMoriioAtOnce: "push",
    SmgMooncake: "refused by decode",
    RayServeDefault: "pull",
    DynamoNixl: "pull",
}


class BothSides:
    """Plays one request through a router to a prefill and a decode instance, without bytes."""

    def __init__(self, router: LlmdSidecar, send_type: SendMode, *, has_roles: bool) -> None:
        self._router = router
        self._roles = ("kv_producer", "kv_consumer") if has_roles else ("kv_both", "kv_both")
        self._send_type = send_type
        self.sent: Intent | None = None
        self.loaded: Intent | None = None
        self.answered: dict[str, Any] | None = None  # by prefill
        self.refusal = ""

    def play(self) -> None:
        """Both requests; what each instance takes them for is in `sent` and `loaded`."""
        body = self._router.prefill_body({"prompt": [1]})
        self.sent = self._read(body, self._prefill)
        self.answered = self._answer(body)
        self._router.take_answer(self.answered)
        seen = None if self._router.is_concurrent else {"kv_transfer_params": self.answered}
        self.loaded = self._read(self._router.decode_body({"prompt": [1]}, seen), self._decode)

    @property
    def how(self) -> str:
        """What became of the request, in a word."""
        if self.refusal:
            assert self.loaded is None
            return "refused by decode"
        if self.sent is None or self.loaded is None:
            assert self.sent is self.loaded is None
            return "not transferred"
        return "pull" if self.loaded.send_type is SendMode.GET else "push"

    @property
    def _prefill(self) -> ThisInstance:
        return self._instance(self._roles[0], P)

    @property
    def _decode(self) -> ThisInstance:
        return self._instance(self._roles[1], D)

    def _instance(self, role: str, served: Served) -> ThisInstance:
        return ThisInstance(
            role, served.kv_address, self._send_type, has_random_ids=True,
            is_registered=self._router.is_told_by_heartbeats,
        )  # fmt: skip

    @property
    def _engine_id(self) -> str:
        return f"cmpl-{self._router.headers['X-Request-Id']}-0-1a2b3c4d"

    def _read(self, body: dict[str, Any], instance: ThisInstance) -> Intent | None:
        params = json.loads(json.dumps(body)).get("kv_transfer_params")
        try:
            return read_intent(self._engine_id, params, instance)
        except InvalidParams as error:
            self.refusal = str(error)
            return None

    def _answer(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the scheduler half of the prefill instance answers when the prompt is computed."""
        half = SchedulerHalf(self._prefill, Weights("w"), [], tp_size=1)
        request = Request(self._engine_id, [1], SamplingParams(max_tokens=1), None)
        request.kv_transfer_params = body.get("kv_transfer_params")
        half.on_new_request(request)
        output = SchedulerOutput.make_empty()
        new = NewRequestData(self._engine_id, [], [], None, None, (), 0, None)
        output.scheduled_new_reqs, output.num_scheduled_tokens = [new], {self._engine_id: 1}
        half.build_metadata(output)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        answered = half.request_finished(request, ([1],))[1]
        return answered if answered is None else dict(json.loads(json.dumps(answered)))


def play(
    router: LlmdSidecar, send_type: SendMode = SendMode.PUT_ASYNC, *, has_roles: bool = True
) -> BothSides:
    both = BothSides(router, send_type, has_roles=has_roles)
    both.play()
    return both


@pytest.mark.parametrize("has_roles", [True, False], ids=["roles", "both"])
@pytest.mark.parametrize(
    ("router", "how"), ROUTERS.items(), ids=lambda item: getattr(item, "__name__", "")
)
def test_every_router(router: type[LlmdSidecar], how: str, has_roles: bool) -> None:
    both = play(router(P, D), has_roles=has_roles)
    assert both.how == how
    if how == "refused by decode":
        assert "remote_bootstrap_addr" in both.refusal
    if how in ("push", "pull"):
        assert both.sent is not None
        assert both.loaded is not None
        assert both.sent.key == both.loaded.key
        assert both.loaded.peer == P.kv_address
        assert both.sent.peer == (D.kv_address if how == "push" else None)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(ROUTERS, key=lambda router: router.__name__)),
    st.sampled_from(SendMode),
    st.booleans(),
    st.dictionaries(st.sampled_from(["remote_engine_id", "tp_size", "remote_dp_size", "user"]),
                    st.none() | st.integers() | st.text(max_size=8)),
)  # fmt: skip
def test_decode_waits_only_for_who_was_told_to_send_to_it(
    router: type[LlmdSidecar], send_type: SendMode, has_roles: bool, others: dict[str, Any]
) -> None:
    """Whatever the send mode is set to, and whatever else a router adds."""

    class WithOthers(router):  # type: ignore[misc, valid-type]
        def prefill_body(self, body: dict[str, Any]) -> dict[str, Any]:
            made = super().prefill_body(body)
            params = made.get("kv_transfer_params")
            return made if params is None else {**made, "kv_transfer_params": {**params, **others}}

    both = play(WithOthers(P, D), send_type, has_roles=has_roles)
    sent, loaded = both.sent, both.loaded
    if loaded is None:
        return
    assert loaded.direction is Direction.LOAD
    assert loaded.peer == P.kv_address  # it can be asked
    assert sent is not None
    assert sent.key == loaded.key
    assert sent.send_type is loaded.send_type
    assert sent.send_type is SendMode.GET or sent.peer == D.kv_address


def test_decode_that_is_told_of_nixls_push_asks_for_it() -> None:
    """To NIXL's push connector, decode says where to write, when it has room; that is our WANT."""
    memory = {
        "remote_engine_id": P.kv_address,
        "remote_host": P.host,
        "remote_port": P.kv_port,
        "tp_size": 1,
        "transfer_mode": "push",
    }
    both = play(LlmdNixlPush(P, D, memory))
    assert both.how == "pull"
    assert both.sent is not None
    assert both.loaded is not None
    assert both.sent.key == both.loaded.key


def test_what_is_held_is_not_called_a_push() -> None:
    """Else llm-d would ask decode before prefill has answered, from then on."""
    memory: dict[str, Any] = {}
    play(LlmdNixlPush(P, D, memory))
    assert memory == {}


def test_an_id_that_names_others_is_no_destination() -> None:
    """Nobody listens for KV at the HTTP addresses of vllm-router's ids, also if instances are
    registered with it."""
    router = VllmRouterAtUrls(P, D)
    router.is_told_by_heartbeats = True
    both = play(router, SendMode.PUT)
    assert both.sent is not None
    assert both.sent.peer is None


@pytest.mark.parametrize("scheduler", ["pull_scheduler", "push_scheduler"])
def test_we_answer_all_that_nixls_connector_answers(scheduler: str) -> None:
    """In the vLLM that is installed here: read from its source, as it needs NIXL to run."""
    package = importlib.util.find_spec("vllm.distributed.kv_transfer.kv_connector.v1")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "nixl" / f"{scheduler}.py"
    answers = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and node.keywords
    ]
    both = play(LlmdSidecar(P, D))
    (theirs,) = [names for names in answers if "remote_block_ids" in names]
    assert both.answered is not None
    assert theirs <= set(both.answered)
    assert both.answered["transfer_mode"] == "pull"
