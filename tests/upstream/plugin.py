"""pytest plugin for upstream's tests, in place of their conftest, which imports half of vLLM."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

from tests.upstream.raising import raising

CONNECTOR = "P2pNcclConnector"

# Tests that do not apply to our connector, by name, each with the reason.
NOT_APPLICABLE = {
    "test_p_side_chunked_prefill_mamba": (
        "asserts NixlConnector's own treatment of Mamba state, a prompt cut by its last token; "
        "models with Mamba layers are refused by name"
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the control run's switch."""
    parser.addoption("--raising-hooks", action="store_true", help="break the connector's hooks")


def pytest_configure(config: pytest.Config) -> None:
    """Register our connector as vLLM's processes do, by its entry point."""
    config.addinivalue_line("markers", "cpu_test: upstream's mark")
    load_general_plugins()  # type: ignore[no-untyped-call]
    if config.getoption("raising_hooks"):
        broken = raising(KVConnectorFactory.get_connector_class_by_name(CONNECTOR))
        KVConnectorFactory._registry[CONNECTOR] = lambda: broken


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what does not apply, with the reason."""
    for item in items:
        reason = NOT_APPLICABLE.get(getattr(item, "originalname", item.name))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
