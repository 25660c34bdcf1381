"""Request ids: the proxy's id, which names both instances, and the engine's, which vLLM derives.

Pure, and standard library only: the proxy formats ids with it, the connector parses them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# A host is a name, an IPv4 address, or an IPv6 address in brackets. It must not contain "___".
_ADDRESS = r"(?:\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9](?:_?[A-Za-z0-9.-]){0,253}):[0-9]{1,5}"
_PROXY_ID = re.compile(
    rf"___prefill_addr_(?P<prefill>{_ADDRESS})"
    rf"___decode_addr_(?P<decode>{_ADDRESS})"
    r"_(?P<transfer_id>[0-9a-f]{32})"
)
_INDEX = r"0|[1-9][0-9]{0,8}"
# Completions always have a prompt index; chats only if one request has several.
_ENGINE_ID = re.compile(
    rf"(?:(?P<child>{_INDEX})_)?"
    rf"(?:cmpl-(?P<completion>.+)-(?P<prompt>{_INDEX})|chatcmpl-(?P<chat>.+?)(?:_(?P<turn>{_INDEX}))?"
    r"|generate-tokens-(?P<tokens>.+))",
    re.DOTALL,
)
_ONE_OF_SEVERAL = re.compile(rf"(?:{_INDEX})_")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}")
_SUFFIX_LENGTH = 9


@dataclass(frozen=True)
class ProxyId:
    """The content of a proxy's id: two instance addresses and the transfer id."""

    prefill: str
    decode: str
    transfer_id: str

    def __str__(self) -> str:
        """Format the id as the `X-Request-Id` of both legs."""
        return f"___prefill_addr_{self.prefill}___decode_addr_{self.decode}_{self.transfer_id}"


@dataclass(frozen=True)
class EngineId:
    """An id that vLLM's engine derives from an external id, per prompt and per choice of `n`."""

    external_id: str
    prompt_index: int = 0
    child_index: int = 0


def new_transfer_id() -> str:
    """Return 32 random hexadecimal digits."""
    return os.urandom(16).hex()


def parse_proxy_id(text: str) -> ProxyId | None:
    """Parse a proxy's id; None for anything that is not exactly one."""
    match = _PROXY_ID.fullmatch(text)
    if match is None:
        return None
    proxy_id = ProxyId(**match.groupdict())
    ports = (int(address.rpartition(":")[2]) for address in (proxy_id.prefill, proxy_id.decode))
    return proxy_id if all(0 < port < 65536 for port in ports) else None


def parse_engine_id(request_id: str, *, is_randomized: bool) -> EngineId | None:
    """Undo vLLM's decoration of a request id; None if it is of another kind of request.

    `is_randomized` says whether vLLM appends eight random hexadecimal digits. It cannot be guessed:
    an external id may end in eight such digits of its own.
    """
    if is_randomized:
        if not _RANDOM_SUFFIX.fullmatch(request_id, len(request_id) - _SUFFIX_LENGTH):
            return None
        request_id = request_id[:-_SUFFIX_LENGTH]
    match = _ENGINE_ID.fullmatch(request_id)
    if match is None:
        return None
    external_id = match["completion"] or match["chat"] or match["tokens"]
    index = match["prompt"] or match["turn"] or 0
    return EngineId(external_id, int(index), int(match["child"] or 0))


def is_one_of_several(request_id: str) -> bool:
    """Whether an engine's request is one of several choices (`n` above 1)."""
    return _ONE_OF_SEVERAL.match(request_id) is not None
