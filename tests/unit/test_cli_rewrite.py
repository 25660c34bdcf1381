"""Old launch commands become commands of today, and each change is said."""

from __future__ import annotations

import json
import shlex

import pytest

from p2p_engine.cli.config_check import config_problems
from p2p_engine.cli.rewrite import Rewrite, rewrite, rewrite_config

OLD_CONFIG = {
    "kv_connector": "P2pNcclConnector",
    "kv_role": "kv_producer",
    "kv_buffer_size": "1e1",
    "kv_port": "21001",
    "kv_rank": 0,
    "kv_parallel_size": 2,
    "kv_ip": "10.0.1.2",
    "kv_connector_extra_config": {
        "proxy_ip": "10.0.1.1",
        "proxy_port": "30001",
        "http_port": "20001",
        "send_type": "PUT_ASYNC",
        "nccl_num_channels": "16",
    },
}
NEW_CONFIG = {
    "kv_connector": "P2pNcclConnector",
    "kv_role": "kv_producer",
    "kv_port": 21001,
    "kv_connector_extra_config": {
        "proxy_ip": "10.0.1.1",
        "proxy_port": "30001",
        "http_port": "20001",
        "send_type": "PUT_ASYNC",
        "nccl_num_channels": "16",
        "kv_buffer_size": "1e1",
    },
}
# As the documentation of vLLM up to 0.23 has it.
OLD_COMMAND = f"""VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 vllm serve "$MODEL" \\
    --host 0.0.0.0 \\
    --port 20001 \\
    --disable-log-request \\
    --swap-space 16 \\
    --kv-transfer-config \\
    {shlex.quote(json.dumps(OLD_CONFIG))} > prefill.log 2>&1 &"""


def config_of(command: str) -> object:
    words = shlex.split(command.replace("\\\n", " "))
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def test_a_config_is_rewritten_and_each_change_said() -> None:
    result = rewrite(json.dumps(OLD_CONFIG))
    assert json.loads(result.text) == NEW_CONFIG
    changed = [change.partition(":")[0] for change in result.changes]
    assert changed == ["kv_ip", "kv_parallel_size", "kv_rank", "kv_buffer_size", "kv_port"]
    # As vLLM's own examples had it for prefill.
    assert "'1e1' is 10 bytes, in which nothing lands" in result.changes[3]
    assert result.problems == []


def test_a_buffer_in_which_kv_lands_needs_no_warning() -> None:
    result = rewrite(json.dumps({**OLD_CONFIG, "kv_buffer_size": "8e9"}))
    (said,) = [change for change in result.changes if change.startswith("kv_buffer_size")]
    assert "bytes" not in said


def test_a_new_config_is_left_alone() -> None:
    result = Rewrite()
    assert rewrite_config(NEW_CONFIG, result) == NEW_CONFIG
    assert (result.changes, result.problems) == ([], [])


def test_a_buffer_size_that_is_already_inside_wins() -> None:
    config = {**NEW_CONFIG, "kv_buffer_size": 5}
    assert rewrite_config(config, Rewrite()) == NEW_CONFIG | {
        "kv_connector_extra_config": NEW_CONFIG["kv_connector_extra_config"]
    }


def test_a_command_keeps_everything_else() -> None:
    result = rewrite(OLD_COMMAND)
    assert config_of(result.text) == NEW_CONFIG
    assert result.text.startswith('CUDA_VISIBLE_DEVICES=0 vllm serve "$MODEL" \\\n    --host')
    assert result.text.endswith("> prefill.log 2>&1 &")
    assert "--port 20001 \\\n    --kv-transfer-config \\\n" in result.text
    assert not any(word in result.text for word in ("VLLM_USE_V1", "swap", "16 \\", "log-request"))
    assert result.problems == []
    assert len(result.changes) == 8


def test_a_rewritten_command_is_left_alone() -> None:
    once = rewrite(OLD_COMMAND)
    twice = rewrite(once.text)
    assert twice.text == once.text
    assert twice.changes == []


def test_shell_variables_inside_the_json_still_work() -> None:
    old = dict(OLD_CONFIG, kv_port="$KV_PORT")
    old["kv_connector_extra_config"] = {"proxy_ip": "$IP", "proxy_port": "$P", "http_port": "$H"}
    quoted = '"' + json.dumps(old).replace('"', '\\"') + '"'
    result = rewrite(f"vllm serve m --kv-transfer-config {quoted}")
    assert '\\"kv_port\\": \\"$KV_PORT\\"' in result.text
    assert config_of(result.text) == rewrite_config(old, Rewrite())
    assert result.problems == []


def test_the_form_with_an_equals_sign() -> None:
    result = rewrite("vllm serve m --kv-transfer-config=" + shlex.quote(json.dumps(OLD_CONFIG)))
    assert result.text.startswith("vllm serve m --kv-transfer-config='{")
    assert json.loads(shlex.split(result.text)[-1].partition("=")[2]) == NEW_CONFIG


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python3 disagg_proxy_p2p_nccl_xpyd.py &", "p2p-engine proxy &"),
        ("cd x; python ../examples/disagg_prefill_proxy_xpyd.py", "cd x; p2p-engine proxy"),
    ],
)
def test_the_old_proxy_becomes_ours(old: str, new: str) -> None:
    result = rewrite(old)
    assert result.text == new
    assert len(result.changes) == 1
    assert result.problems == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_role": "kv_prefill"}, "kv_role is 'kv_prefill'; allowed: kv_producer"),
        ({"kv_connector": "PyNcclConnector"}, "ours is 'P2pNcclConnector'"),
        ({"kv_speed": 3}, "kv_speed: vLLM refuses this key"),
        ({"kv_connector_extra_config": {"send_type": "PUSH"}}, "send_type='PUSH'"),
        (
            {"kv_connector_extra_config": {"proxy_ip": "h", "proxy_port": 1}},
            "http_port is required",
        ),
        ({"kv_connector_extra_config": {"proxi_ip": "h"}}, "unknown key 'proxi_ip'"),
        ({"kv_connector_extra_config": "{}"}, "is '{}'; allowed: a JSON object"),
        ({"kv_port": 65536}, "kv_port is 65536; allowed: 0 to 65535"),
        ({"kv_port": -1}, "kv_port is -1"),
        ({"kv_port": 1.5}, "kv_port is 1.5"),
        ({"kv_port": None}, "kv_port is None"),
        ({"kv_port": "first"}, "kv_port is 'first'"),
    ],
)
def test_what_a_person_must_decide_is_a_problem(change: dict[str, object], problem: str) -> None:
    (found,) = config_problems({**NEW_CONFIG, **change})
    assert problem in found


def test_a_wrong_http_port_is_a_problem() -> None:
    result = rewrite(OLD_COMMAND.replace("--port 20001", "--port 20002"))
    assert result.problems == ["http_port is 20001 but --port is 20002"]


def test_a_command_without_a_connector_is_a_problem() -> None:
    assert rewrite("vllm serve m").problems != []


@pytest.mark.parametrize("text", ["{", "{]", "vllm serve m --kv-transfer-config '[1]'"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        rewrite(text)
