"""The handshake of vLLM's NixlConnector, as far as it takes to refuse one of them by name.

Its decode side asks at `remote_host` and `remote_port` for a rank's metadata, with a REQ socket. It
waits five seconds for two parts: a payload, and its peer's clock. It compares the payload's first
field with its own, and shows both if they differ. vLLM 0.29 to 0.33 do so alike.
"""

from __future__ import annotations

import msgspec

_BEGINNING = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))[:-2]  # ends with the stage and rank
REFUSAL = "refused: P2pNcclConnector is here, not NixlConnector; both instances must have its class"


def is_question(parts: list[bytes]) -> bool:
    """Whether a message is that question; REQ puts an empty part before it."""
    return len(parts) == 2 and not parts[0] and parts[1].startswith(_BEGINNING)


def refusal() -> list[bytes]:
    """Return the parts of an answer that no NixlConnector accepts; its log has REFUSAL."""
    payload = {"compatibility_hash": REFUSAL, "agent_metadata_bytes": b""}
    return [b"", msgspec.msgpack.encode(payload), msgspec.msgpack.encode(0.0)]
