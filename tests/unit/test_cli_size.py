"""`p2p-engine size`: its figures are those of the code that takes the memory, and it refuses what
it cannot compute. That it reads a model as vLLM does: test_cli_size_families.py."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from p2p_engine import TransferKey
from p2p_engine.cli import doctor
from p2p_engine.cli.app import app
from p2p_engine.cli.model_shape import FAMILIES, LayerKind, ModelShape, plain_model
from p2p_engine.cli.size import KV_ROLES, Demand, Sizing
from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.memory.arena import MIN_BLOCK_BYTES
from p2p_engine.sizing import Room, has_landing_memory
from tests.rigs.engines import settings, start
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

ROOT = Path(__file__).parents[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIG = {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}
NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-size", "128")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["size", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def write(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changes}))
    return str(folder)


def value(output: str, name: str) -> str:
    """The value of the last figure of this name."""
    found = re.findall(rf"^  {re.escape(name)} {{2,}}(.+?)(?: {{2,}}|$)", output, re.MULTILINE)
    assert found, output
    return str(found[-1])


def sizing(mode: str = "PUT_ASYNC", model: ModelShape | None = None, **load: Any) -> Sizing:
    chosen = model or plain_model(32, 8, 128, "bfloat16")
    config = EngineConfig(send_type=SendMode(mode)).on_device("cuda:0")
    return Sizing(chosen, Demand(**{"num_tokens": 8192, "num_prompts": 16, **load}), config)


def test_the_figures_of_a_known_model(tmp_path: Path) -> None:
    """Counted by hand: an 8B Llama keeps 128 KiB of each token."""
    result = run("--model", write(tmp_path), "--gpu-memory", "16")
    assert result.exit_code == 0
    assert value(result.output, "KV of a token, full attention") == "131,072 B"
    assert value(result.output, "KV of a prompt") == "1.00 GiB"
    assert value(result.output, "KV of all prompts") == "16.00 GiB"
    decode = result.output.split("kv_consumer,")[1].split("kv_both,")[0]
    assert float(value(decode, "mem_pool_size_gb")) == pytest.approx(
        (16 + 3 / 32) * 9 / 7 - 0.93, abs=0.05
    )
    assert value(decode, "--gpu-memory-utilization") == "0.86"  # 1,738 and 512 of 16,384 MiB


def test_numbers_take_the_place_of_a_model(tmp_path: Path) -> None:
    of_model = run("--model", write(tmp_path), "--gpu-memory", "16").output
    of_numbers = run(*NUMBERS, "--kv-cache-dtype", "bfloat16", "--gpu-memory", "16").output
    assert of_model.splitlines()[1:] == of_numbers.splitlines()[1:]


def test_ranks_share_heads_until_each_has_one() -> None:
    model = plain_model(1, 8, 128, "float16")
    assert [model.token_bytes(tp) for tp in (1, 2, 4, 8, 16)] == [4096, 2048, 1024, 512, 512]


def test_behind_a_window_no_block_is_counted() -> None:
    kind = LayerKind("", 1, 1, 1, "", window=100)
    for num_tokens in (1, 90, 100, 101, 1000):
        expected = {position // 16 for position in range(max(0, num_tokens - 100), num_tokens)}
        assert kind.num_blocks(num_tokens, 16) == len(expected)
        group = LayerGroup(0, (), cast("Any", SimpleNamespace(block_size=16)), window=100)
        sent = group.num_blocks(num_tokens) - group.first_block(num_tokens)
        assert kind.num_blocks(num_tokens, 16) == sent


def test_a_prompt_is_whole_blocks() -> None:
    assert sizing(num_tokens=1).prompt_bytes == sizing(num_tokens=16).prompt_bytes
    assert sizing(num_tokens=17).prompt_bytes == 2 * sizing(num_tokens=16).prompt_bytes


@pytest.mark.parametrize("kv_role", KV_ROLES)
@pytest.mark.parametrize("mode", ["PUT", "PUT_ASYNC", "GET"])
def test_settings_give_what_is_needed(kv_role: str, mode: str) -> None:
    size = sizing(mode).rank(kv_role)
    assert bool(size.landing_bytes) == has_landing_memory(kv_role, SendMode(mode))
    if size.landing_bytes:
        assert size.settings.kv_buffer_size + size.settings.pool_bytes >= size.landing_bytes
        assert size.settings.kv_buffer_size + size.settings.pool_bytes < size.landing_bytes + GIB


def test_the_largest_chunk_lands_uncut() -> None:
    """A sender cuts chunks to an eighth of the larger landing memory."""
    settings = sizing("GET", num_prompts=1, num_tokens=16).rank("kv_consumer").settings
    assert max(settings.kv_buffer_size, settings.pool_bytes) >= 8 * 2 * MIB
    small = sizing("GET", num_prompts=1)
    assert small.rank("kv_consumer").landing_bytes == 8 * (small.chunk_bytes + MIN_BLOCK_BYTES)


def test_a_given_buffer_is_kept() -> None:
    asked = sizing()
    asked.settings = dataclasses.replace(asked.settings, kv_buffer_size=4 * GIB)
    size = asked.rank("kv_consumer")
    assert size.settings.kv_buffer_size == 4 * GIB
    assert 4 * GIB + size.settings.pool_bytes >= size.landing_bytes


@pytest.mark.parametrize("num_prompts", [1, 7, 16])
def test_so_many_prompts_land_and_none_is_denied(rng: SeededRandom, num_prompts: int) -> None:
    """With the PUT modes they wait on decode, here until somebody asks; a real engine takes them
    all, and denies some where only their own bytes are there."""
    row = MIB // 2 - MIN_BLOCK_BYTES // 2
    model = ModelShape("", "fp8", (LayerKind("", 1, 1, row, ""),))
    load = Demand(num_tokens=1, num_prompts=num_prompts, block_size=1)
    asked = Sizing(model, load, settings("tcp"))
    size = asked.rank("kv_consumer").settings
    assert denied(size, rng, num_prompts, row) == 0
    alone = num_prompts * asked.prompt_bytes
    if num_prompts > 8:  # below, what a chunk needs is more than the prompts
        bare = dataclasses.replace(size, kv_buffer_size=alone, mem_pool_size_gb=0)
        assert denied(bare, rng, num_prompts, row) > 0


def denied(config: EngineConfig, rng: SeededRandom, count: int, nbytes: int) -> int:
    """Push so many tensors that nobody asks for; return how often one was denied by the time when
    all have landed, or one was."""
    with start(settings("tcp")) as sender, start(config) as receiver:
        tensor = random_tensor(rng, nbytes)
        sends = [
            sender.send_tensor(
                TransferKey(f"request-{i}", "layers.0"), tensor, receiver.zmq_address
            )
            for i in range(count)
        ]

        def is_decided() -> bool:
            was_denied = sender.stats()["denied_offers"] > 0
            return was_denied or all(send.released for send in sends)

        eventually(is_decided, what="prompts have landed")
        return int(sender.stats()["denied_offers"])


def test_other_settings_of_a_given_configuration_stay() -> None:
    """Also those of a MultiConnector, in which the entry of ours is changed."""
    extra = {"chunk_bytes": 1 << 20, "proxy_ip": "10.0.0.1", "proxy_port": 30001, "http_port": 8100}
    ours = {**CONFIG, "kv_port": 21001, "kv_connector_extra_config": extra}
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, ours]},
    }
    for given in (ours, both):
        config = json.dumps(given)
        result = run(*NUMBERS, "--kv-cache-dtype", "float16", "--kv-transfer-config", config)
        assert value(result.output, "chunk") == "2.0 MiB"  # one block
        found = re.search(r"--kv-transfer-config '(.+)'", result.output)
        assert found is not None, result.output
        printed = json.loads(found[1])
        entries = printed["kv_connector_extra_config"].get("connectors", [other, printed])
        assert entries[0] == other
        assert entries[1]["kv_port"] == 21001
        assert extra.items() <= entries[1]["kv_connector_extra_config"].items()
        assert entries[1]["kv_connector_extra_config"]["mem_pool_size_gb"] > 0


@pytest.mark.parametrize("mode", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("kv_role", KV_ROLES)
def test_the_doctor_agrees(kv_role: str, mode: str) -> None:
    """What is printed for an instance passes its own check, with the same figure for the GPU."""
    result = run(*NUMBERS, "--kv-cache-dtype", "float16", "--gpu-memory", "24", "--send-type", mode)
    part = result.output.split(f"{kv_role}, ")[1].split("\nkv_")[0]
    found = re.search(r"--kv-transfer-config '(.+)'", part)
    assert found is not None
    config = json.loads(found[1])
    room = Room(24 * GIB, float(value(part, "--gpu-memory-utilization")))
    (finding,) = doctor.check_device_memory(config, room)
    assert finding.level.name == "OK"
    again = run(*NUMBERS, "--kv-cache-dtype", "float16", "--gpu-memory", "24",
                "--kv-transfer-config", found[1])  # fmt: skip
    assert again.output.count("kv_role") == 1
    assert value(again.output, "GPU: engine") == value(part, "GPU: engine")


def test_what_a_prefill_instance_spills_is_counted_by_the_doctor() -> None:
    for mode, expected in (("GET", True), ("PUT_ASYNC", False)):
        config = EngineConfig(send_type=SendMode(mode), mem_pool_size_gb=1)
        finding = doctor.check_memory(config, "kv_producer", 1, GIB)
        assert (finding.level.name == "CHANGE") == expected


def test_a_gpu_without_room_is_an_error() -> None:
    result = run(*NUMBERS, "--kv-cache-dtype", "float16", "--gpu-memory", "1")
    assert result.exit_code == 1
    assert "do not fit" in result.output


def test_a_cache_in_host_memory_needs_no_gpu() -> None:
    result = run(*NUMBERS, "--kv-cache-dtype", "float16", "--device", "cpu")
    assert result.exit_code == 0
    assert "GPU" not in result.output
    assert "buffer and pool" in result.output


def test_cache_bytes_are_lowered_where_they_are_given() -> None:
    arguments = ("--kv-cache-dtype", "float16", "--gpu-memory", "24")
    result = run(*NUMBERS, *arguments, "--kv-cache-memory-bytes", str(20 * GIB))
    assert int(value(result.output, "--kv-cache-memory-bytes")) <= 20 * GIB


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known: deepseek_v2"),
        ({"model_type": None}, "model_type 'None' is not known"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is set"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is set"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; allowed: a number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types is not 32 times"),
        ({"layer_types": [{}] * 32}, "layer_types is not 32 times"),
        ({"head_dim": "wide"}, "head_dim is 'wide'; allowed: a number above 0"),
        ({"head_dim": [128]}, "head_dim is [128]"),
        ({"head_dim": -128}, "head_dim is -128"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"hidden_size": 8}, "hidden_size is 8, and num_attention_heads 32"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "6"}, "pattern is '6'"),
        ({"torch_dtype": "float32"}, "dtype 'float32'"),
        ({"torch_dtype": None}, "dtype None"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantises its KV cache"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window is set"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is None"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is None"),
    ],
)
def test_a_model_that_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    result = run("--model", write(tmp_path, **changes))
    assert result.exit_code == 2
    assert words in " ".join(re.findall(r"[^│╭╰╮╯─\s]+", result.output))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--layers, --kv-heads, --head-size, --kv-cache-dtype: required without --model"),
        (("--layers", "2", "--kv-heads", "2", "--kv-cache-dtype", "fp8"), "--head-size: required"),
        (NUMBERS, "--kv-cache-dtype: required without --model, and not auto; allowed: bfloat16"),
        (
            (*NUMBERS, "--kv-cache-dtype", "fp8", "--send-type", "GET", "--kv-transfer-config",
             json.dumps({**CONFIG, "kv_connector_extra_config": {"send_type": "PUT"}})),
            "--send-type GET: --kv-transfer-config says PUT",
        ),
        (
            (*NUMBERS, "--kv-cache-dtype", "fp8", "--kv-transfer-config",
             '{"kv_connector": "NixlConnector"}'),
            "--kv-transfer-config: kv_connector is 'NixlConnector'; ours is 'P2pNcclConnector'",
        ),
        ((*NUMBERS, "--model", "m"), "allowed: the one or the other"),
        (("--model", "nowhere"), "allowed: a config.json"),
        ((*NUMBERS, "--kv-cache-dtype", "int3"), "--kv-cache-dtype int3"),
        ((*NUMBERS, "--kv-cache-dtype", "fp8", "--tp", "3"), "the model has 8 KV heads"),
        ((*NUMBERS, "--kv-cache-dtype", "fp8", "--device", "tpu"), "allowed: cuda, cpu"),
        ((*NUMBERS, "--kv-cache-dtype", "fp8", "--context", "0"), "--context"),
        ((*NUMBERS, "--kv-cache-dtype", "fp8", "--kv-transfer-config", "{}"), "kv_role is None"),
        (
            (*NUMBERS, "--kv-cache-dtype", "fp8", "--kv-transfer-config",
             json.dumps({**CONFIG, "kv_buffer_device": "cpu"})),
            "kv_buffer_device is cpu",
        ),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(re.findall(r"[^│╭╰╮╯─\s]+", result.output))


def test_a_model_of_another_dtype_may_be_named(tmp_path: Path) -> None:
    write(tmp_path, torch_dtype="float32")
    result = run("--model", str(tmp_path / "config.json"), "--kv-cache-dtype", "fp8")
    assert value(result.output, "KV of a token, full attention") == "65,536 B"


@pytest.mark.parametrize("is_own_file", [True, False])
def test_what_older_modelopt_says_of_the_cache_is_read(tmp_path: Path, is_own_file: bool) -> None:
    """As vLLM does, which then has a cache in FP8."""
    scheme = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    path = write(tmp_path, **({} if is_own_file else {"quantization_config": scheme}))
    if is_own_file:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(scheme))
    result = run("--model", path)
    assert result.exit_code == 2
    assert "quantises its KV cache" in " ".join(re.findall(r"[^│╭╰╮╯─\s]+", result.output))


def test_it_needs_no_vllm(tmp_path: Path) -> None:
    program = "import sys; sys.modules['vllm'] = None; from p2p_engine.cli.app import app; app()"
    command = [sys.executable, "-c", program, "size", "--model", write(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mem_pool_size_gb" in done.stdout


def test_the_families_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    (line,) = re.findall(r"^Families: (.+?)\.$", text, re.M | re.S)
    assert set(re.findall(r"`(\w+)`", line)) == FAMILIES


def test_the_example_of_the_page_prints_what_the_page_says() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    command, expected = re.findall(r"```bash\n(.+?)```.+?```text\n(.+?)```", text, re.DOTALL)[0]
    _, name, *arguments = shlex.split(command.replace("\\\n", " "))
    assert name == "size"
    printed = CliRunner().invoke(app, [name, *arguments]).output
    assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines()


def test_every_option_is_explained_with_its_default() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text().split("## Options")[1].split("##")[0]
    rows = re.findall(r"^\| (`--.+?) \| (.*?) ?\|", text, re.MULTILINE)
    told = {name: default for names, default in rows for name in re.findall(r"`(--[\w-]+)`", names)}
    command = get_command(app).commands["size"]  # type: ignore[attr-defined]
    known = {option.opts[0]: option.default for option in command.params}
    assert set(told) == set(known) - {"--help"}
    for name, default in known.items():
        if name in told and re.fullmatch(r"`?[\d.a-z]+`?", told[name]):
            assert told[name].strip("`") == str(default), name
