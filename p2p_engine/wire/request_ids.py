"""Request ids: the proxy's id, which names instances, and the engine's, which vLLM derives.

The rule: a proxy's id is any text with `___prefill_addr_HOST:PORT`, `___decode_addr_HOST:PORT`, or
both. The whole id is the transfer's name, so both legs must have the same one. Two kinds of names
are shorter: of an id that names one instance, what stands around the address, because the other leg
names the other one there; of an id in our own form, its 32 digits.

Pure, and standard library only: the proxy formats ids with it, the connector parses them.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

# A host is a name, an IPv4 address, or an IPv6 address in brackets. It must not contain "___".
_ADDRESS = r"(?:\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9](?:_?[A-Za-z0-9.-]){0,253}):[0-9]{1,5}"
_MARKS = ("___prefill_addr_", "___decode_addr_")
_NAMED = re.compile(rf"___(prefill|decode)_addr_({_ADDRESS})(?![0-9.,:])")
_OWN_NAME, _OWN_NAME_LENGTH = re.compile(r"[0-9a-f]{32}"), 32
MAX_NAME_LENGTH = 256
_INDEX = r"0|[1-9][0-9]{0,8}"
# Completions always have a prompt index; chats only if one request has several. A response has the
# number of its call: behind the first, with what a tool has said, its prompt is another one.
_ENGINE_ID = re.compile(
    rf"(?:(?P<child>{_INDEX})_)?"
    rf"(?:cmpl-(?P<completion>.+)-(?P<prompt>{_INDEX})|chatcmpl-(?P<chat>.+?)(?:_(?P<turn>{_INDEX}))?"
    rf"|generate-tokens-(?P<tokens>.+)|(?P<response>.+_(?P<call>{_INDEX})))",
    re.DOTALL,
)
_ONE_OF_SEVERAL = re.compile(rf"(?:{_INDEX})_")
_BEAM = re.compile(rf"-[0-9a-f]+-beam-(?:{_INDEX})\Z")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}")
_SUFFIX_LENGTH = 9


@dataclass(frozen=True)
class ProxyId:
    """The content of a proxy's id: the instances' addresses ("" where it names only the other one)
    and the transfer's name."""

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
    # It is asked with what a tool has said: the other instance is not asked that.
    is_later_call: bool = False


def new_transfer_id() -> str:
    """Return 32 random hexadecimal digits."""
    return os.urandom(16).hex()


def looks_like_proxy_id(text: str) -> bool:
    """Whether a text has a mark of a proxy's id, also if no address stands behind the mark."""
    return any(mark in text for mark in _MARKS)


def parse_proxy_id(text: str) -> ProxyId | None:
    """Parse a proxy's id; None if it names no instance, or several in one role, or no transfer, or
    if an address cannot be read: the leg that it is for would find half an id."""
    found = [match for match in _NAMED.finditer(text) if _has_port(match[2])]
    named = {match[1]: match[2] for match in found}
    if not found or not len(named) == len(found) == sum(map(text.count, _MARKS)):
        return None
    name = text
    if len(named) == 1:
        name = text[: found[0].start()] + text[found[0].end() :].strip("_")
    elif _OWN_NAME.fullmatch(text, len(text) - _OWN_NAME_LENGTH):
        own = ProxyId(named["prefill"], named["decode"], text[-_OWN_NAME_LENGTH:])
        name = own.transfer_id if str(own) == text else text
    if not name:
        return None
    return ProxyId(named.get("prefill", ""), named.get("decode", ""), _bounded(name))


def _has_port(address: str) -> bool:
    return 0 < int(address.rpartition(":")[2]) < 65536


def _bounded(name: str) -> str:
    """Return a name that messages and logs can carry: a digest of one that is long or not plain."""
    if len(name) <= MAX_NAME_LENGTH and name.isascii() and name.isprintable():
        return name
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


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
    if match is None or _BEAM.search(request_id):  # each beam has a prompt of its own
        return None
    external_id = match["completion"] or match["chat"] or match["tokens"] or match["response"]
    index = match["prompt"] or match["turn"] or 0
    is_response = external_id.startswith("resp_") or looks_like_proxy_id(external_id)
    is_later_call = is_response and int(match["call"] or 0) > 0
    return EngineId(external_id, int(index), int(match["child"] or 0), is_later_call)


def is_one_of_several(request_id: str) -> bool:
    """Whether an engine's request is one of several choices (`n` above 1)."""
    return _ONE_OF_SEVERAL.match(request_id) is not None
