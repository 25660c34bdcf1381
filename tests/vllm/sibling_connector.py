"""Connectors that move nothing, to stand beside ours in a MultiConnector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

MODULE = __name__


@dataclass(frozen=True)
class SiblingHandshake(KVConnectorHandshakeMetadata):
    """What a worker of the other kind tells its scheduler at start."""

    address: str = "elsewhere:1"


class SilentConnector(KVConnectorBase_V1, SupportsHMA):
    """Never has KV, and says nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answer with a key of our own."""
        return False, {"sibling": type(self).__name__}


class HandshakingConnector(SilentConnector):
    """Its workers tell its scheduler something at start, and it will not do without."""

    _has_heard = False

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Something."""
        return SiblingHandshake()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Note that it came."""
        self._has_heard = set(metadata.values()) == {SiblingHandshake()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Refuse to go on without the others' word."""
        if self._role is KVConnectorRole.SCHEDULER and not self._has_heard:
            raise RuntimeError("nobody told me where my workers are")
        return KVConnectorMetadata()


class NixlBaseConnector(SilentConnector):
    """As one that answers with keys that ours has."""
