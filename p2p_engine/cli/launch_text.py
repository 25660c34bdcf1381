"""LaunchText: the settings and options that a launch file has, line by line, whatever it is written
in.

A launch file is a shell script, YAML, JSON, a Dockerfile or a program. It is not parsed as any of
these: quotes and backslashes count as nothing, so each depth of quoting reads alike. Braces,
brackets of a call and indentation tell which settings stand together.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_COMMENT = re.compile(r"^[ \t]*(?:#|//|;).*$", re.MULTILINE)
_IGNORED = " \t\n\\'\"[>|-"  # what may stand between a key and its mapping
# A value ends at a blank, a quote or a bracket that is not the shell's own. If what stands before
# is no key, the value is read again, so its length is bounded.
_VARIABLE = r"\$\{[^{}\n]{0,200}\}|\$\((?:[^()\n]|\([^()\n]{0,200}\)){0,200}\)"
_VALUE = rf"""(?:{_VARIABLE}|[^\s,{{}}\[\]()'"\\`]){{0,512}}"""
_LEXEME = re.compile(
    rf"""
    \n(?P<indent>[ \t]*)(?P<dashes>(?:-[ \t]+)*)
    | (?P<mark>[{{}}(),])
    | (?<![\w.$%/-])(?P<key>[A-Za-z_][\w-]*)(?P<quote>[\\'"]{{0,32}})[ \t]*(?P<equals>[:=])
      (?P<rest>[ \t]*[\\'"]{{0,32}}(?P<value>{_VALUE}))
    """,
    re.VERBOSE,
)
_OPTION = re.compile(
    rf"""
    (?<![\w-])--(?P<name>[A-Za-z][\w.-]*)
    (?:[\\'"\s,=]|-[ \t]|[>|]-?[ \t]*\n){{0,80}}
    (?P<value>(?!--){_VALUE}|)
    """,
    re.VERBOSE,
)
_CALL = re.compile(r"(?:KVTransferConfig|dict)[ \t]?\Z")
_CALL_LENGTH = 20
_LINE_END = re.compile(r"[ \t]*(?:#.*)?(?:\n|\Z)")
DOTTED = "kv_transfer_config."


@dataclass
class Setting:
    """A key and its value; `below` are the settings of a value that is a mapping."""

    key: str
    value: str
    line: int
    below: list[Setting] = field(default_factory=list)


@dataclass
class _Frame:
    """A mapping that is being read: it ends at its bracket, or where a line begins at its column
    or before."""

    settings: list[Setting]
    bracket: str = ""
    column: int = -1


class LaunchText:
    """What is found in one text. A comment that has its line alone is left out."""

    def __init__(self, text: str) -> None:
        """Read the text."""
        self.text = "\n" + _COMMENT.sub("", text.replace("\r", ""))  # each line has a begin
        self._starts = [found.end() for found in re.finditer("\n", self.text)]
        self.options = [
            Setting(_name(found["name"]), found["value"], self.line_at(found.start()))
            for found in _OPTION.finditer(self.text)
        ]
        mappings = _MappingReader(self).read() + _of_dotted_options(self.options)
        self.mappings = [mapping for mapping in mappings if mapping]

    def line_at(self, place: int) -> int:
        """Return the number of a character's line; the first is 1."""
        return bisect.bisect_right(self._starts, place)

    def find(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
        """Yield each match with the number of the line in which it begins."""
        for found in pattern.finditer(self.text):
            yield self.line_at(found.start()), found


class _MappingReader:
    """Reads the text once. A key counts if it is in quotes, or begins a line, an item of a mapping
    or an argument of a call."""

    def __init__(self, text: LaunchText) -> None:
        self._source = text
        self._text = text.text
        self._frames = [_Frame([])]
        self._found = [self._frames[0].settings]
        self._waiting: list[Setting] | None = None  # of a key whose mapping has not begun
        self._last = ""  # the lexeme before: a mark, a line's begin, or neither
        self._end = 0  # of that lexeme

    def read(self) -> list[list[Setting]]:
        """Return all mappings, also those inside others; what is in none makes the first."""
        while lexeme := _LEXEME.search(self._text, self._end):
            is_next = not self._text[self._end : lexeme.start()].strip(_IGNORED)
            last = self._last if is_next else ""
            waiting = self._waiting if is_next else None
            self._end = lexeme.end()
            if lexeme["indent"] is not None:
                self._begin_line(lexeme, last)
                continue
            self._last = lexeme["mark"] or ""
            self._waiting = None
            if lexeme["mark"]:
                self._pass_mark(lexeme, last, waiting)
            else:
                self._read_key(lexeme, last in ("{", "(", ",", "\n"))
        return self._found

    def _push(self, settings: list[Setting], bracket: str = "", column: int = -1) -> None:
        self._frames.append(_Frame(settings, bracket, column))
        self._found.append(settings)

    def _begin_line(self, lexeme: re.Match[str], last: str) -> None:
        is_inside = self._frames[-1].bracket
        self._last = last if is_inside and last else "\n"
        if is_inside or self._text[self._end : self._end + 1] in ("", "\n"):
            return
        column = len(lexeme["indent"])
        while self._frames[-1].column >= column:
            self._frames.pop()
        if lexeme["dashes"]:
            self._push([], column=column)

    def _pass_mark(self, lexeme: re.Match[str], last: str, waiting: list[Setting] | None) -> None:
        mark, top = lexeme["mark"], self._frames[-1]
        before = self._text[max(0, lexeme.start() - _CALL_LENGTH) : lexeme.start()]
        if mark == "{" and last == "{" and waiting is None:  # doubled, as where Python formats it
            self._push(top.settings, "}")
        elif mark == "{":
            self._push([] if waiting is None else waiting, "}")
        elif mark == "(" and (top.bracket == ")" or _CALL.search(before)):
            self._push([] if waiting is None else waiting, ")")
        elif mark == "}" or (mark == ")" and top.bracket == ")"):
            self._close(mark)

    def _close(self, mark: str) -> None:
        if any(frame.bracket == mark for frame in self._frames):
            while self._frames.pop().bracket != mark:
                pass

    def _is_key(self, lexeme: re.Match[str], is_fresh: bool) -> bool:
        top = self._frames[-1]
        if lexeme["equals"] == "=":
            return is_fresh and top.bracket == ")"
        if lexeme["quote"]:
            return self._text[lexeme.start() - 1] in "'\""
        return is_fresh and (top.bracket == "}" or not lexeme["rest"] or lexeme["rest"][0] in " \t")

    def _read_key(self, lexeme: re.Match[str], is_fresh: bool) -> None:
        if not self._is_key(lexeme, is_fresh):
            self._end = lexeme.start("rest")
            return
        line, value = self._source.line_at(lexeme.start()), lexeme["value"]
        if value.startswith("#"):
            value, self._end = "", lexeme.start("value")
        elif value == "dict" or value.startswith(("&", "!")):  # a mapping's, in Python or YAML
            value = ""
        setting = Setting(_name(lexeme["key"]), value, line)
        top = self._frames[-1]
        top.settings.append(setting)
        if setting.value:
            return
        self._waiting = setting.below
        if not top.bracket and _LINE_END.match(self._text, self._end):
            column = lexeme.start() - self._text.rfind("\n", 0, lexeme.start()) - 1
            self._push(setting.below, column=column)


def _name(name: str) -> str:
    return name.replace("-", "_")


def _of_dotted_options(options: list[Setting]) -> list[list[Setting]]:
    """Return the configurations whose keys are options, such as `--kv-transfer-config.kv_role`. An
    option that comes again begins the next one."""
    found: list[list[Setting]] = []
    seen: set[str] = set()
    for option in options:
        if not option.key.startswith(DOTTED):
            continue
        if not found or option.key in seen:
            found.append([])
            seen = set()
        seen.add(option.key)
        mapping = found[-1]
        *path, key = option.key.removeprefix(DOTTED).split(".")
        for name in path:
            if all(setting.key != name for setting in mapping):
                mapping.append(Setting(name, "", option.line))
            mapping = next(setting.below for setting in mapping if setting.key == name)
        mapping.append(Setting(key, option.value, option.line))
    return found
