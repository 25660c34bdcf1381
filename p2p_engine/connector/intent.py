"""Intent: the transfer that a request asks for, by `kv_transfer_params` or by its id. Pure.

Both come from clients. Malformed values raise InvalidParams and nothing else.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from p2p_engine.config import SendMode
from p2p_engine.connector.untransferred import Reason
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import TransferKey
from p2p_engine.wire.request_ids import (
    EngineId,
    ProxyId,
    looks_like_proxy_id,
    parse_engine_id,
    parse_proxy_id,
)

logger = logging.getLogger(__name__)

MAX_TRANSFER_ID_LENGTH = 256
# What prefill is told: of how many of the prompt's first tokens decode should have the KV. What it
# answers: of how many it holds the KV, which is not pushed.
HAS_TOKENS, HELD_TOKENS = "remote_has_tokens", "remote_held_tokens"
NUM_TOKENS = "remote_num_tokens"  # what it answers: of how many it gives the KV
MAX_TOKENS = 1 << 32
# What prefill answers of its own request: it was for one choice; it had no cache salt.
ONLY_CHOICE, UNSALTED = "is_only_choice", "is_unsalted"
STASH_SUFFIX = "/stash"  # of the name of what decode keeps, behind that of what was sent to it
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})")


class InvalidParams(ValueError):
    """A client's transfer parameters, or its id, are invalid; the message names the value and the
    reason."""

    def __init__(self, message: str, reason: Reason = Reason.INVALID_PARAMS) -> None:
        super().__init__(message)
        self.reason = reason


class Direction(enum.Enum):
    """The direction of a request's KV."""

    SEND = "send"
    LOAD = "load"


class Stashes(enum.Enum):
    """Whether decode keeps a request's KV for its session's next turn."""

    NO = "no"
    QUIETLY = "quietly"  # the router knows where
    AND_SAYS_SO = "and says so"  # in the answer, as NixlConnector does


@dataclass(frozen=True)
class Earlier:
    """Where the KV of a session's last turn is stashed."""

    key: TransferKey
    peer: str


@dataclass(frozen=True)
class ThisInstance:
    """The facts about this instance on which an intent depends."""

    role: str  # kv_producer, kv_consumer or kv_both
    address: str  # host:port of its directory
    send_type: SendMode
    has_random_ids: bool  # whether vLLM appends random digits to request ids
    is_registered: bool = False  # with a router, which then makes the request ids


@dataclass(frozen=True)
class Intent:
    """A request that takes part in a transfer; `peer` is the other instance's address, if known."""

    direction: Direction
    key: TransferKey
    peer: str | None
    send_type: SendMode
    is_salted: bool = True  # whether the request's cache salt, if it has one, is prefill's too
    earlier: Earlier | None = None  # to be recalled before it is sent
    stashes: Stashes = Stashes.NO
    # Of so many of its first tokens: sent, the peer should have the KV; loaded, the peer holds it.
    held_tokens: int = 0
    num_tokens: int = 0  # loaded: of so many the peer gives the KV, by its answer; 0: nobody says


def read_intent(
    request_id: str, params: Mapping[str, Any] | None, instance: ThisInstance
) -> Intent | None:
    """Return the intent of a request; None if it takes no part and is computed here.

    The flags in `params` take precedence. Without them, the proxy's request id and the role of this
    instance decide. Beside flags, the id only adds what they leave out, and only if this instance
    is registered: other routers pass on whatever id a client gives them.

    Raises:
        InvalidParams: the parameters are malformed, or the id looks like a proxy's and is useless.
    """
    engine_id = parse_engine_id(request_id, is_randomized=instance.has_random_ids)
    proxy_id = parse_proxy_id(engine_id.external_id) if engine_id is not None else None
    if params is not None and not isinstance(params, Mapping):
        raise InvalidParams(f"kv_transfer_params is {type(params).__name__}, not a map")
    direction = _flagged_direction(params or {})
    if engine_id is not None and engine_id.is_later_call and (direction or proxy_id):
        raise InvalidParams(
            "a later call of a response, with a prompt of its own", Reason.OTHER_PROMPT
        )
    if params is not None and direction is not None:
        engine_id = engine_id or EngineId(request_id)
        is_named = proxy_id is not None and proxy_id.prefill and proxy_id.decode
        proxy_id = proxy_id if instance.is_registered and is_named else None
        return _flagged_intent(direction, params, engine_id, proxy_id, instance)
    if engine_id is not None and proxy_id is not None:
        return _intent_by_id(proxy_id, engine_id, instance)
    if looks_like_proxy_id(request_id):
        raise InvalidParams(f"the id {_shown(request_id)} cannot be read", Reason.UNUSABLE_ID)
    return None


def _intent_by_id(proxy_id: ProxyId, engine_id: EngineId, instance: ThisInstance) -> Intent:
    direction = _direction_by_role(proxy_id, instance)
    key = _key(proxy_id.transfer_id, engine_id)
    peer = _other(_peer_of(proxy_id, direction), instance) or None
    # Who waits for a push need not know who sends.
    if peer is None and (direction is Direction.SEND or instance.send_type is SendMode.GET):
        raise InvalidParams("the id does not name the other instance", Reason.NO_ADDRESS)
    return Intent(direction, key, peer, instance.send_type)


def _flagged_direction(params: Mapping[str, Any]) -> Direction | None:
    sends, loads = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if sends and loads:
        raise InvalidParams("do_remote_decode and do_remote_prefill are both set")
    return Direction.SEND if sends else Direction.LOAD if loads else None


def _flagged_intent(
    direction: Direction,
    params: Mapping[str, Any],
    engine_id: EngineId,
    proxy_id: ProxyId | None,
    instance: ThisInstance,
) -> Intent | None:
    if direction is Direction.LOAD and engine_id.child_index and _flag(params, ONLY_CHOICE):
        return None  # the first choice takes the one KV that there is
    peer = _other(_flagged_peer(direction, params, proxy_id, instance), instance)
    send_type = _send_type(params) or instance.send_type
    transfer_id = _transfer_id(params, "transfer_id")
    if transfer_id is None and proxy_id is not None:
        transfer_id = proxy_id.transfer_id
    if direction is Direction.SEND:
        # A producer that was given no name names the transfer itself, in its response.
        transfer_id = transfer_id or engine_id.external_id
        send_type = send_type if peer is not None else SendMode.GET
    elif transfer_id is None:
        # NixlConnector's way: the decode side fetches what the prefill side's response named.
        transfer_id, send_type = _transfer_id(params, "remote_request_id"), SendMode.GET
    elif params.get("send_type") is None and params.get("transfer_mode") is not None:
        # NixlConnector's push: prefill was told nothing of us, and we have to tell it.
        send_type = SendMode.GET
    if transfer_id is None:
        raise InvalidParams("do_remote_prefill without transfer_id")
    if direction is Direction.LOAD:
        _check_engine(params) if peer else _check_load_from_anybody(params, send_type)
    key = _key(transfer_id, engine_id)
    if direction is Direction.SEND:
        earlier = _earlier(params, engine_id, instance)
        is_pushed = peer is not None and send_type is not SendMode.GET
        held_tokens = _num_tokens(params, HAS_TOKENS, key) if is_pushed else 0
        return Intent(direction, key, peer, send_type, earlier=earlier, held_tokens=held_tokens)
    is_salted, stashes = not _flag(params, UNSALTED), _stashes(params)
    held_tokens, num_tokens = (_num_tokens(params, name, key) for name in (HELD_TOKENS, NUM_TOKENS))
    return Intent(
        direction, key, peer, send_type, is_salted,
        stashes=stashes, held_tokens=held_tokens, num_tokens=num_tokens,
    )  # fmt: skip


def stash_key(key: TransferKey) -> TransferKey:
    """Return the name of what decode keeps of the transfer of this name."""
    return msgspec.structs.replace(key, transfer_id=key.transfer_id + STASH_SUFFIX)


def _stashes(params: Mapping[str, Any]) -> Stashes:
    if params.get("stash") is None:
        return Stashes.AND_SAYS_SO
    return Stashes.QUIETLY if _flag(params, "stash") else Stashes.NO


def _earlier(
    params: Mapping[str, Any], engine_id: EngineId, instance: ThisInstance
) -> Earlier | None:
    """Return where an earlier turn's KV is: in our proxy's words, or in NixlConnector's. What is
    malformed costs its recall only."""
    try:
        if params.get("remote_block_ids"):
            _check_engine(params)
            name, peer = _transfer_id(params, "remote_request_id"), _peer(params)
        else:
            place = {f"remote_{part}": params.get(f"stashed_{part}") for part in ("host", "port")}
            name, peer = _transfer_id(params, "stashed_as"), _peer(place)
        if name is None or peer is None or peer == instance.address:
            return None
        return Earlier(stash_key(_key(name, engine_id)), peer)
    except InvalidParams as error:
        logger.debug("nothing is recalled: %s", str(error))
        return None


def _flagged_peer(
    direction: Direction,
    params: Mapping[str, Any],
    proxy_id: ProxyId | None,
    instance: ThisInstance,
) -> str | None:
    """Return the other instance: the one that the parameters name, else the one in the id."""
    is_sent = direction is Direction.SEND
    if is_sent and params.get("remote_block_ids"):
        # NixlConnector's way from decode to prefill: they say where an earlier turn's KV lies.
        return None
    named = _peer(params)
    if named is not None or proxy_id is None:
        return named
    if is_sent and proxy_id.prefill != instance.address:
        return None  # vllm-router puts HTTP addresses into its ids if it knows no others
    return _peer_of(proxy_id, direction)


def _check_load_from_anybody(params: Mapping[str, Any], send_type: SendMode) -> None:
    if send_type is SendMode.GET:
        raise InvalidParams(
            "do_remote_prefill without remote_host and remote_port", Reason.NO_ADDRESS
        )
    if params.get("remote_bootstrap_addr") is not None:
        # MooncakeConnector's way: decode asks there, and prefill is told of nobody.
        raise InvalidParams(
            "remote_bootstrap_addr without remote_host and remote_port: nobody would send",
            Reason.NO_ADDRESS,
        )


def _check_engine(params: Mapping[str, Any]) -> None:
    """Refuse what vLLM's own NixlConnector has answered: an engine of ours is named by its address.
    A message of ours would end the thread that answers NIXL's handshakes."""
    engine = params.get("remote_engine_id")
    if params.get("send_type") is not None or not isinstance(engine, str):
        return
    try:
        is_address = split_address(engine)[1] == params.get("remote_port")  # routers keep ports
    except ValueError:
        is_address = False
    if not is_address:
        raise InvalidParams(
            f"remote_engine_id {_shown(engine)} is an engine of vLLM's NixlConnector, not ours: "
            "both instances must have P2pNcclConnector's class"
        )


def _direction_by_role(proxy_id: ProxyId, instance: ThisInstance) -> Direction:
    if instance.role == "kv_producer":
        return Direction.SEND
    if instance.role == "kv_consumer":
        return Direction.LOAD
    prefill, decode, own = proxy_id.prefill, proxy_id.decode, instance.address
    is_prefill = prefill == own or not (prefill or decode == own)
    is_decode = decode == own or not (decode or prefill == own)
    if is_prefill == is_decode:
        said = f"the id names prefill {_shown(prefill)} and decode {_shown(decode)}"
        raise InvalidParams(f"{said}; this instance is {own}", Reason.NO_ADDRESS)
    return Direction.SEND if is_prefill else Direction.LOAD


def _peer_of(proxy_id: ProxyId, direction: Direction) -> str:
    return proxy_id.decode if direction is Direction.SEND else proxy_id.prefill


def _other(peer: str | None, instance: ThisInstance) -> str | None:
    if peer == instance.address:
        raise InvalidParams(f"the other instance's address is our own: {peer}")
    return peer


def _key(transfer_id: str, engine_id: EngineId) -> TransferKey:
    if len(transfer_id) > MAX_TRANSFER_ID_LENGTH:
        raise InvalidParams(f"the transfer id has {len(transfer_id)} characters")
    return TransferKey(
        transfer_id, prompt_index=engine_id.prompt_index, child_index=engine_id.child_index
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidParams(f"{name} is {_shown(value)}, not true or false")


def _transfer_id(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.isprintable() or not value.isascii() or not value:
        raise InvalidParams(f"{name} is {_shown(value)}, not a name")
    return value


def _send_type(params: Mapping[str, Any]) -> SendMode | None:
    value = params.get("send_type")
    if value is None:
        return None
    try:
        return SendMode(value)
    except ValueError:
        raise InvalidParams(f"send_type is {_shown(value)}") from None


def _peer(params: Mapping[str, Any]) -> str | None:
    host = params.get("remote_host")
    if host is None and params.get("remote_port") is None:
        return None
    if not isinstance(host, str):
        raise InvalidParams(f"remote_host is {_shown(host)}, not a host")
    return f"{_host(host)}:{_port(params)}"


def _port(params: Mapping[str, Any]) -> int:
    """Return the port of the rank's directory.

    With a `send_type`, one of us has answered it: `remote_port` is that port. A router's own
    parameters for MoRIIOConnector name the first data-parallel rank's port, and the rank; their
    `remote_port` may be another server's.
    """
    is_answered = params.get("send_type") is not None and params.get("remote_port") is not None
    if is_answered or params.get("remote_handshake_port") is None:
        return _number(params, "remote_port", lowest=1)
    port = _number(params, "remote_handshake_port", lowest=1)
    if params.get("remote_dp_rank") is None:
        return port
    if isinstance(hosts := params.get("remote_hosts"), list) and len(hosts) > 1:
        raise InvalidParams("remote_hosts does not say which of them has remote_dp_rank")
    rank = _number(params, "remote_dp_rank", lowest=0)
    if port + rank > 65535:
        raise InvalidParams(f"remote_handshake_port {port} has no port for remote_dp_rank {rank}")
    return port + rank


def _number(params: Mapping[str, Any], name: str, *, lowest: int) -> int:
    """Return a port or a rank; it may come as text."""
    value = params.get(name)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= 65535:
        return value
    raise InvalidParams(f"{name} is {_shown(value)}, not {lowest} to 65535")


def _num_tokens(params: Mapping[str, Any], name: str, key: TransferKey) -> int:
    """Return a number of tokens; 0 if there is none. It is about the first of several prompts."""
    value = params.get(name) or 0
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return 0 if key.prompt_index else value
    raise InvalidParams(f"{name} is {_shown(value)}, not a number of tokens")


def _host(host: str) -> str:
    """Return the host in the form of an address; IPv6 in brackets."""
    if _HOST_NAME.fullmatch(host):
        return host
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return f"[{ipaddress.IPv6Address(bare)}]"
    except ValueError:
        raise InvalidParams(f"remote_host is {_shown(host)}, not a host") from None


def _shown(value: object) -> str:
    """Return a client's value for a message, cut to the length of a log line."""
    if isinstance(value, str):
        return repr(value if len(value) <= 64 else f"{value[:64]}...")
    if isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() <= 64):
        return repr(value)
    return f"of type {type(value).__name__}"
