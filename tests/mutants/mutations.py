"""The small changes that make a mutant of a module, each at one place in a function's body."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "*"),
}  # fmt: skip
BOOLEANS: dict[type[ast.boolop], tuple[str, str]] = {
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
JUMPS: dict[type[ast.stmt], str] = {ast.Break: "continue", ast.Continue: "break"}
# Their absence changes what people read, and nothing else.
LOGGING = {"debug", "info", "warning", "error", "exception", "log"}
Plain = ast.Name | ast.Call | ast.Attribute  # other conditions have operators to change
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """A place in a module's source, in bytes, and the text that takes the place of what is there.

    `lines` are the first and the last line of the statement, without the body of a compound one.
    """

    lines: tuple[int, int]
    begin: int
    end: int
    text: str
    what: str
    function: str

    def apply(self, source: str) -> str:
        """Return the source of the mutant."""
        raw = source.encode()
        return (raw[: self.begin] + self.text.encode() + raw[self.end :]).decode()


class ModuleMutations:
    """The mutations of a module's source. A few of them leave no Python: see `is_python`."""

    def __init__(self, source: str) -> None:
        self._raw = source.encode()
        self._tree = ast.parse(source)
        lengths = map(len, self._raw.splitlines(keepends=True))
        self._starts = list(accumulate(lengths, initial=0))
        self._function = ""
        self._lines = (0, 0)

    def __iter__(self) -> Iterator[Mutation]:
        """Yield each mutation."""
        return self._in_body_of(self._tree, "")

    def _in_body_of(self, parent: ast.AST, name: str) -> Iterator[Mutation]:
        """Yield what is in functions: other lines run when a module is imported, by every test."""
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Functions):
                self._function = f"{name}{node.name}"
                for statement in node.body[ast.get_docstring(node) is not None :]:
                    yield from self._of(statement)
            elif isinstance(node, ast.ClassDef):
                yield from self._in_body_of(node, f"{name}{node.name}.")

    def _of(self, node: ast.AST) -> Iterator[Mutation]:
        """Yield the mutations of a node and of all below it but annotations."""
        if isinstance(node, ast.stmt):
            self._lines = _lines_of(node)
        yield from self._here(node)
        for field, value in ast.iter_fields(node):
            if field not in {"annotation", "returns", "decorator_list"}:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._of(child)

    def _here(self, node: ast.AST) -> Iterator[Mutation]:
        """Yield the mutations of one node."""
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                yield from self._operator(left, right, *COMPARISONS[type(op)])
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator(left, right, *BOOLEANS[type(node.op)])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield from self._operator(node.left, node.right, *ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replaced(node, f"({ast.unparse(node.operand)})", "without not")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.stmt):
            yield from self._statement(node)

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        if isinstance(node.value, bool):
            yield self._replaced(node, str(not node.value), f"{node.value} is {not node.value}")
        elif isinstance(node.value, int | float):
            yield self._replaced(node, str(node.value + 1), f"{node.value} is {node.value + 1}")

    def _statement(self, node: ast.stmt) -> Iterator[Mutation]:
        if type(node) in JUMPS:
            other = JUMPS[type(node)]
            yield self._replaced(node, other, f"{other} instead")
        elif isinstance(node, ast.Return) and not _is_nothing(node.value):
            yield self._replaced(node, "return None", "returns None")
        elif isinstance(node, ast.If) and isinstance(
            node.test, ast.Name | ast.Call | ast.Attribute
        ):
            yield self._replaced(node.test, f"not ({ast.unparse(node.test)})", "condition negated")
        elif _is_effect(node):
            yield self._replaced(node, "pass", f"without `{ast.unparse(node).splitlines()[0]}`")

    def _operator(
        self, left: ast.expr, right: ast.expr, token: str, text: str
    ) -> Iterator[Mutation]:
        """Yield another operator between two operands."""
        begin, end = self._span(left)[1], self._span(right)[0]
        found = re.search(rb"\b%b\b" % token.encode() if token.isalpha() else token.encode(),
                          self._raw[begin:end])  # fmt: skip
        if found is not None:
            shown = found.group().decode()
            place = (begin + found.start(), begin + found.end())
            yield Mutation(self._lines, *place, text, f"{shown} is {text}", self._function)

    def _replaced(self, node: ast.expr | ast.stmt, text: str, what: str) -> Mutation:
        """Return the mutation that puts a text in a node's place."""
        return Mutation(self._lines, *self._span(node), text, what, self._function)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes of the source."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[end_line - 1] + end_column,
        )


def is_python(source: str) -> bool:
    """Tell whether a source can be compiled."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _lines_of(node: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, without those of its body."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, last)


def _is_nothing(node: ast.expr | None) -> bool:
    """Tell whether a function returns None in any case."""
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_effect(node: ast.stmt) -> bool:
    """Tell whether a statement does something and defines no local name: a call that does more
    than log, a change of an attribute or of an item, a deletion."""
    if isinstance(node, ast.Expr):
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call):
            return False
        return not (isinstance(value.func, ast.Attribute) and value.func.attr in LOGGING)
    if isinstance(node, ast.Assign):
        return all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete)
