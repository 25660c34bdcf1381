"""What old launch files of any kind have is named by line, whatever quotes are around it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from p2p_engine.cli.config_check import TOP_LEVEL_KEYS
from p2p_engine.cli.launch_text import LaunchText
from p2p_engine.cli.migrate import MAX_FILE_BYTES, changes, run_migrate
from p2p_engine.cli.old_settings import (
    NIXL_CONNECTORS,
    NIXL_SETTINGS,
    REMOVED_KEYS,
    REMOVED_OPTIONS,
    REMOVED_VARIABLES,
)
from p2p_engine.config import EXTRA_KEYS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "launch_files"
# Each has its report beside it.
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".report")
CONFIG = '{"kv_connector": "$KV_CONNECTOR", "kv_role": "kv_both", "kv_rank": 0}'

Report = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Report on texts, each as a file of its own; return the exit code and the lines."""
    monkeypatch.chdir(tmp_path)

    def run(*texts: str) -> tuple[int, list[str]]:
        paths = [Path(f"file{number}") for number, _ in enumerate(texts)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        with Console(width=80, force_terminal=False, record=True) as console:
            code = run_migrate(paths, console)
        return code, console.export_text().splitlines()

    return run


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_has_the_report_beside_it(path: Path, report: Report) -> None:
    code, lines = report(path.read_text())
    said = [line.removeprefix("file0:").lstrip() for line in (*lines, f"exit code {code}")]
    assert said == path.with_name(f"{path.name}.report").read_text().splitlines()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_another_system_is_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "start.ps1"
    path.write_bytes("kv_connector: P2pNcclConnector\r\nkv_rank: 0\r\n".encode(encoding))
    with Console(width=80, force_terminal=False, record=True) as console:
        assert run_migrate([path], console) == 1
    assert f"{path}:2: kv_rank" in console.export_text().replace("\n", "")


def test_a_value_that_a_program_computes_is_not_judged(report: Report) -> None:
    text = """{"kv_connector": "P2pNcclConnector", "kv_connector_extra_config": {
        "http_port": str(self.port), "proxy_port": port, "send_type": mode, "host": null}}"""
    assert report(text)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "kv_connector: P2pNcclConnector\nkv_connector_extra_config: # ours\n  remote_tp_size: 2\n",
        "kv_connector: P2pNcclConnector\nkv_connector_extra_config: &all\n  remote_tp_size: 2\n",
        'dict(kv_connector="P2pNcclConnector", kv_connector_extra_config=dict(remote_tp_size=2))',
    ],
    ids=["comment", "anchor", "dict"],
)
def test_what_stands_before_a_mapping_does_not_hide_it(text: str, report: Report) -> None:
    code, (line,) = report(text)
    assert (code, "remote_tp_size: remove it" in line) == (1, True)


def test_our_class_under_nixls_name_is_judged_as_ours(report: Report) -> None:
    text = """{"kv_connector": "NixlConnector", "kv_connector_module_path": "p2p_engine.connector",
        "kv_connector_extra_config": {"kv_lease_duration": 30, "remote_tp_size": 2}}"""
    code, (line,) = report(text)
    assert (code, "remote_tp_size" in line) == (1, True)


def test_a_long_line_of_no_keys_is_read_quickly() -> None:
    """Each value was read to the end of the line: 30 kB took 12 s."""
    text = LaunchText("a:b;" * 10_000)
    assert text.mappings == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_that_ends_anywhere_is_read(path: Path) -> None:
    text = path.read_text()
    for end in range(0, len(text), 41):
        assert all(line <= text.count("\n") + 1 for line, _ in changes(LaunchText(text[:end])))


def test_a_connector_that_another_file_names_is_understood(report: Report) -> None:
    name = "KV_CONNECTOR=P2pNcclConnector\n"
    code, lines = report(name, f"vllm serve m --kv-transfer-config '{CONFIG}'\n")
    assert code == 1
    assert lines[0] == "file0: nothing to change"
    assert lines[1].startswith("file1:1: kv_rank: remove it")
    assert report(name)[0] == 2


def test_nixls_name_in_a_variable_is_named_where_it_stands(report: Report) -> None:
    code, lines = report("KV_CONNECTOR=NixlConnector\n", CONFIG.replace('"kv_rank": 0', '"x": 1'))
    assert code == 1
    assert lines[0].startswith("file0:1: NixlConnector: write P2pNcclConnector")


def test_a_label_that_a_router_needs_is_left_alone(report: Report) -> None:
    """Smg takes us for NIXL by this label, and that is right (docs/integrations.md)."""
    code, lines = report(f"smg --worker-label kv_connector=NixlConnector\n# x\n{CONFIG}\n")
    assert [line.partition(":")[2] for line in lines if "Nixl" in line] == []
    assert code == 1


def test_a_value_from_elsewhere_is_not_understood_unless_its_file_is_given(report: Report) -> None:
    command = 'vllm serve m --kv-transfer-config "$(cat decode.json)"\n'
    code, lines = report(command)
    assert code == 2
    assert lines == [
        "file0:1: --kv-transfer-config $(cat decode.json): NOT UNDERSTOOD; its value is in no file "
        "given"
    ]
    ours = '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}'
    assert report(command, ours) == (0, ["file0: nothing to change", "file1: nothing to change"])


def test_settings_of_other_connectors_are_left_alone(report: Report) -> None:
    extra = '"kv_connector_extra_config": {"num_threads": 4, "backends": ["x"]}'
    assert report(f'{{"kv_connector": "OffloadingConnector", {extra}}}')[0] == 0


SHAPES = {
    "braces": "{",
    "calls": "dict(a=",
    "keys": "kv_rank: 0\n",
    "options": "--a > > ",
    "quotes": "'\\",
    "shells": '"a":$(',
    "word": "x",
}


@pytest.mark.parametrize("part", SHAPES.values(), ids=SHAPES.keys())
def test_a_text_of_any_shape_is_read_to_its_end(part: str) -> None:
    """Once for each character, or the test ends by its timeout."""
    text = part * (MAX_FILE_BYTES // 8 // len(part))
    assert len(set(changes(LaunchText(text)))) == text.count("kv_rank")


def test_the_page_has_the_table_of_nixls_settings() -> None:
    page = (ROOT / "docs" / "getting_started.md").read_text()
    section = page.split("\n## Coming from NixlConnector\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    told = {name: instead.replace("`", "") for name, instead in rows}
    assert told == {**NIXL_CONNECTORS, **NIXL_SETTINGS}


def test_what_is_removed_is_no_setting_of_today() -> None:
    assert not REMOVED_KEYS.keys() & TOP_LEVEL_KEYS
    assert not NIXL_SETTINGS.keys() & EXTRA_KEYS
    named = " ".join((*NIXL_SETTINGS.values(), *REMOVED_KEYS.values(), *NIXL_CONNECTORS.values()))
    words = set(re.findall(r"[a-z]+_[a-z_]+", named))
    assert words <= EXTRA_KEYS | TOP_LEVEL_KEYS


@pytest.fixture
def vllm() -> Path:
    """The folder of vLLM's sources. They are read, as their import takes long."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.origin:
        pytest.skip("vLLM is not installed")
    return Path(found.origin).parent


def test_vllm_has_no_removed_option_or_variable(vllm: Path) -> None:
    files = [vllm / "engine" / "arg_utils.py", *(vllm / "entrypoints").rglob("cli_args.py")]
    names = {
        node.target.id
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {"kv_transfer_config", "enable_log_requests", "chat_template"} <= names
    assert not REMOVED_OPTIONS.keys() & names
    variables = set(re.findall(r'^    "(VLLM_\w+)":', (vllm / "envs.py").read_text(), re.MULTILINE))
    assert REMOVED_VARIABLES.keys() & variables == {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"}


def test_every_setting_of_nixls_connector_is_in_the_table(vllm: Path) -> None:
    folder = vllm / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "nixl"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    keys = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', sources))
    variables = set(re.findall(r"\bVLLM_NIXL_SIDE\w+", (vllm / "envs.py").read_text()))
    assert len(keys) > 5
    assert keys | variables <= NIXL_SETTINGS.keys()
    factory = (folder.parents[1] / "factory.py").read_text()
    assert set(re.findall(r'"(Nixl\w+)"', factory)) <= NIXL_CONNECTORS.keys()
