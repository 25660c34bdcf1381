"""Tell which tests look at insides: they have to be rewritten from outside before a redesign."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What callers, operators, vLLM and routers see, and what the core is built on: a redesign of the
# core keeps it. So it does limits, whose names are in capitals.
OUTSIDE = (
    "p2p_engine.cli",
    "p2p_engine.config",
    "p2p_engine.connector.P2pNcclConnector",
    "p2p_engine.connector.compat",
    "p2p_engine.connector.connector",
    "p2p_engine.control.fleet_key",
    "p2p_engine.engine",
    "p2p_engine.errors",
    "p2p_engine.gpu",
    "p2p_engine.integrations",
    "p2p_engine.memory.host",
    "p2p_engine.memory.jobs",
    "p2p_engine.memory.layout",
    "p2p_engine.memory.paged",
    "p2p_engine.memory.plan",
    "p2p_engine.peers.directory",
    "p2p_engine.peers.link.InstanceAddress",
    "p2p_engine.peers.link.PeerAddress",
    "p2p_engine.simulate",
    "p2p_engine.sizing",
    "p2p_engine.transfer",
    "p2p_engine.transfer_config",
    "p2p_engine.transports",
    "p2p_engine.wire.addresses",
    "p2p_engine.wire.bindings",
    "p2p_engine.wire.identity",
    "p2p_engine.wire.messages.CacheSpec",
    "p2p_engine.wire.messages.Heartbeat",
    "p2p_engine.wire.messages.OLDEST_VERSION",
    "p2p_engine.wire.messages.PROTOCOL_VERSION",
    "p2p_engine.wire.messages.PageShape",
    "p2p_engine.wire.messages.Publisher",
    "p2p_engine.wire.messages.TransferKey",
    "p2p_engine.wire.request_ids",
    "proxy.app",
    "proxy.config",
    "proxy.errors",
    "proxy.main",
)
# Helpers that play with parts of the core, or with messages by name.
INSIDE_HELPERS = (
    "tests.chaos",
    "tests.doubles.control",
    "tests.doubles.turns_world",
    "tests.doubles.world",
    "tests.gpu.replay",
    "tests.property",
)


def is_within(name: str, parents: tuple[str, ...]) -> bool:
    """Tell whether a dotted name is one of these, or lies below one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def is_inside(name: str) -> bool:
    """Tell whether a dotted name is a part of the product that a redesign may take away."""
    if name.startswith("tests."):
        return is_within(name, INSIDE_HELPERS)
    product = name.startswith(("p2p_engine.", "proxy.")) and name.count(".") > 1
    is_limit = name.rpartition(".")[2].isupper()
    return product and not is_limit and not is_within(name, OUTSIDE)


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a file imports, and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def is_private(node: ast.AST) -> bool:
    """Tell whether an expression reads a private attribute of another object."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
        return False
    own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
    return not own and not node.attr.startswith("__")


class References:
    """One test file: what its top-level functions, classes and values refer to."""

    def __init__(self, tree: ast.Module) -> None:
        self.stands_for = dict(imported(tree))
        self.defined: dict[str, ast.AST] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined[node.name] = node
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                self.defined |= dict.fromkeys(names, node)

    def looks_inside(self, name: str) -> bool:
        """Tell whether a test, or what it uses of its file, touches insides."""
        waiting, seen = [name], {name}
        while waiting:
            for node in ast.walk(self.defined[waiting.pop()]):
                word = self._word(node)
                if is_private(node) or is_inside(self.stands_for.get(word, word)):
                    return True
                if word in self.defined and word not in seen:
                    seen.add(word)
                    waiting.append(word)
        return False

    @staticmethod
    def _word(node: ast.AST) -> str:
        """Return the name that a node mentions: a variable, a fixture or a string to patch."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.arg):
            return node.arg
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def references(path: str) -> References:
    """Return what a test file of the repository refers to, parsed once."""
    return References(ast.parse((ROOT / path).read_text("utf-8")))


def looks_inside(path: str, name: str) -> bool:
    """Tell whether the test of this name in this file, such as `tests/unit/test_store.py`, looks
    at private attributes, at messages by name, or at objects of one module of the core."""
    return references(path).looks_inside(name)
