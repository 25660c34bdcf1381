"""One instance that prefills and one that decodes, asked directly: each request says how its KV
moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.wire.request_ids import new_transfer_id
from tests.compat.workload import Answer, Question, ask
from tests.vllm.observing import prompt_tokens

SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")


@dataclass(frozen=True)
class DirectPair:
    """One of each."""

    fleet: Fleet
    prefill: Member
    decode: Member

    def ask_prefill(self, question: Question, transfer_id: str, send_type: str) -> None:
        """Ask for one token, and for the KV to be sent."""
        params = {"do_remote_decode": True, **_other(self.decode, transfer_id, send_type)}
        ask(self.prefill.url, changed(question, kv_transfer_params=params, max_tokens=1))

    def ask_decode(
        self, question: Question, transfer_id: str, send_type: str, request_id: str = ""
    ) -> Answer:
        """Ask for an answer from KV that is sent, and for nothing to be kept for a next turn."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        return ask(self.decode.url, self.decode_leg(question, transfer_id, send_type), headers)

    def decode_leg(self, question: Question, transfer_id: str, send_type: str) -> Question:
        """What decode is asked then."""
        other = _other(self.prefill, transfer_id, send_type)
        return changed(
            question, kv_transfer_params={"do_remote_prefill": True, "stash": False, **other}
        )

    def transfer(
        self, question: Question, send_type: str = "PUT_ASYNC", request_id: str = ""
    ) -> Answer:
        """Ask prefill, then decode."""
        transfer_id = new_transfer_id()
        self.ask_prefill(question, transfer_id, send_type)
        return self.ask_decode(question, transfer_id, send_type, request_id)

    @property
    def both(self) -> list[Member]:
        """Prefill and decode."""
        return [self.prefill, self.decode]


@dataclass(frozen=True)
class DirectTrio(DirectPair):
    """A pair, and one instance alone."""

    single: Member

    @property
    def proxy_url(self) -> str:
        """Where the proxy answers."""
        assert self.fleet.proxy is not None
        return self.fleet.proxy.url

    def alone(self, question: Question) -> Answer:
        """Ask the single instance."""
        return ask(self.single.url, question)


class TokensSince:
    """How many tokens of prompts a member has computed, found in its cache, or was sent, since this
    was made."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._before = prompt_tokens(member)

    def __getitem__(self, source: str) -> int:
        return prompt_tokens(self._member)[source] - self._before[source]


def changed(question: Question, **changes: Any) -> Question:
    """Return a question with other fields."""
    body: Mapping[str, Any] = {**question.body, **changes}
    return Question(question.path, body)


def _other(member: Member, transfer_id: str, send_type: str) -> dict[str, Any]:
    assert member.plan is not None
    host, port = member.plan.host, member.plan.kv_port
    return {"transfer_id": transfer_id, "send_type": send_type, "remote_host": host,
            "remote_port": port}  # fmt: skip
