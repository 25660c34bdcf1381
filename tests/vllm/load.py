"""How the long tests load their instances, and what must hold afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial

from p2p_engine.cli.commands import Role
from p2p_engine.cli.members import Member
from tests.compat.workload import Question, mixed_questions
from tests.support import eventually
from tests.vllm.observing import by_label, holds_nothing, prompt_tokens
from tests.vllm.other_models import ensure_model

NUM_REQUESTS = 200
CONCURRENCY = 8


ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def decodes(members: Sequence[Member]) -> list[Member]:
    """Those that only decode."""
    return [m for m in members if m.plan is not None and m.plan.role is Role.DECODE]


def landed_bytes(members: Sequence[Member]) -> Counter[str]:
    """KV bytes that have arrived on these, by place."""
    return sum((by_label(m, "vllm:p2p_landed_bytes", "place") for m in members), Counter())


@lru_cache
def questions_for(model: str = "llama") -> list[Question]:
    """200 mixed requests to the tiny Llama, 100 to another of our models."""
    path = str(ensure_model(model))
    mixed = [question for seed in range(1000, 1020) for question in mixed_questions(path, seed)]
    return mixed[: NUM_REQUESTS if model == "llama" else NUM_REQUESTS // 2]


def check_transferred(
    members: Sequence[Member], questions: Sequence[Question], *, has_window: bool = False
) -> None:
    """All KV was transferred: decode computed each prompt's last token alone.

    vLLM counts that one where it was not transferred, too: with a window, or the only one.
    """
    tokens = sum((prompt_tokens(member) for member in decodes(members)), Counter())
    counts = [item.num_prompts if has_window else item.num_lone_tokens for item in questions]
    assert tokens["external_kv_transfer"] > 0
    assert tokens["local_compute"] == sum(counts)


def check_nothing_held(members: Sequence[Member]) -> None:
    """Live bytes are back at zero everywhere."""
    for member in members:
        eventually(partial(holds_nothing, member), 30, f"{member.name} holds nothing")
