"""What an instance says of itself on its metrics page."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from p2p_engine.cli.members import Member, fetch_text


def by_label(member: Member, metric: str, label: str) -> Counter[str]:
    """One metric of an instance, summed by one of its labels ("": all together)."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(fetch_text(f"{member.url}/metrics") or ""):
        for sample in family.samples if family.name == metric else ():
            if not sample.name.endswith("_created"):
                found[sample.labels.get(label, "")] += int(sample.value)
    return found


def prompt_tokens(member: Member) -> Counter[str]:
    """How many prompt tokens an instance computed, found in its cache, or was sent."""
    return by_label(member, "vllm:prompt_tokens_by_source", "source")


def holds_nothing(member: Member) -> bool:
    """Whether the instance's engines hold no KV bytes."""
    return not sum(by_label(member, "vllm:p2p_live_bytes", "place").values())
