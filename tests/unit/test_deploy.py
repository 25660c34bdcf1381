"""deploy/ starts only what there is: options, settings, a connector. `make check-deploy` holds it
against the schemas of what reads it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from p2p_engine.cli.app import app
from p2p_engine.cli.commands import option_value
from p2p_engine.cli.config_check import config_problems
from p2p_engine.transfer_config import CONNECTOR
from proxy.main import _parser as proxy_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
INSTANCES_POLICY = ("NetworkPolicy", "p2p-instance")
KSERVES_MODEL = "/mnt/models"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


# Of pd-sidecar in llm-d-router v0.10.0 (pkg/sidecar/proxy/options.go), as far as we use them.
SIDECAR_RELEASE = "v0.10.0"
SIDECAR_OPTIONS = {"--port", "--model-server-port", "--kv-connector", "--secure-proxy"}


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """The description of every pod in the manifests of a file."""
    for manifest in yaml.safe_load_all(path.read_text()):
        spec = manifest.get("spec", {})
        for pod in (spec.get("template"), spec.get("prefill", {}).get("template")):
            if pod:
                yield pod.get("spec", pod)


def containers(path: Path) -> Iterator[dict[str, Any]]:
    """Every container of ours in the manifests of a file."""
    for pod in pods(path):
        yield from pod["containers"]


def commands_of(container: dict[str, Any]) -> Iterator[list[str]]:
    """What a container starts, and what it runs before it ends."""
    arguments = container.get("args", [])
    for variable in container.get("env", ()):
        if variable["name"] == "VLLM_ADDITIONAL_ARGS":
            arguments = ["vllm", "serve", KSERVES_MODEL, *shlex.split(variable["value"])]
    yield [*container.get("command", []), *arguments]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec")
    if hook:
        yield shlex.split(hook["command"][-1])[1:]


def commands(path: Path) -> Iterator[list[str]]:
    """The commands of all containers of a file."""
    for container in containers(path):
        yield from commands_of(container)


def started_by(unit: Path) -> Iterator[list[str]]:
    """What a unit of systemd starts and runs before it ends, with values for its variables."""
    text = re.sub(r"\$\{?PORT\}?", "8000", unit.read_text())
    text = text.replace("${TRANSFER}", f'{{"kv_connector":"{CONNECTOR}","kv_role":"kv_both"}}')
    for line in re.findall(r"^Exec(?:Start|Stop)=/usr/bin/env (.+?)(?: \$ARGUMENTS)?$", text, re.M):
        yield [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]


STARTED = [
    pytest.param(command, id=f"{path.name}-{number}")
    for path, read in ((p, r) for ps, r in ((MANIFESTS, commands), (UNITS, started_by)) for p in ps)
    for number, command in enumerate(read(path))
]


def test_all_that_is_started_has_been_found() -> None:
    programs = [tuple(parameter.values[0][:2]) for parameter in STARTED]  # type: ignore[index]
    assert programs.count(("p2p-engine", "proxy")) == 2
    assert programs.count(("p2p-engine", "drain")) == 3
    assert programs.count(("vllm", "serve")) == 7
    assert len(programs) == 12


@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize("command", STARTED)
def test_every_option_is_known_to_what_is_started(command: list[str]) -> None:
    if command[:2] == ["p2p-engine", "proxy"]:
        proxy_parser().parse_args(command[2:])
    elif command[:2] == ["p2p-engine", "drain"]:
        given = {word.partition("=")[0] for word in command[2:]}
        parameters = get_command(app).commands["drain"].params  # type: ignore[attr-defined]
        required = {item.opts[0] for item in parameters if item.required}
        assert required <= given <= {name for item in parameters for name in item.opts}
    else:
        pytest.importorskip("vllm")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        empty = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
        parsed = make_arg_parser(empty).parse_args(command[2:])
        # KServe adds its own.
        assert (parsed.shutdown_timeout > 0) != (parsed.model_tag == KSERVES_MODEL)
        assert parsed.kv_transfer_config.kv_connector == CONNECTOR


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_transfer_config_is_accepted_and_names_the_ports_of_its_container(path: Path) -> None:
    for container in containers(path):
        for command in commands_of(container):
            text = option_value(command, "--kv-transfer-config")
            if text is None:
                continue
            config = json.loads(text)
            assert config_problems(config) == []
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            extra = config.get("kv_connector_extra_config", {})
            assert ports.get("kv", config.get("kv_port")) == config.get("kv_port")
            assert extra.get("http_port", ports.get("http")) == ports.get("http")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_key_file_is_mounted(path: Path) -> None:
    for pod in pods(path):
        secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
        for container in pod["containers"]:
            mounts = container["volumeMounts"]
            folders = {item["mountPath"] for item in mounts if item["name"] in secrets}
            text = json.dumps([*commands_of(container)])
            files = re.findall(r"(/[\w/-]+)/[\w-]+\.key", text)
            assert "/etc/p2p-engine" in files
            assert set(files) <= folders


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_container_gives_up_what_it_does_not_need(path: Path) -> None:
    for pod in pods(path):
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            allowed = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert allowed["runAsNonRoot"] is True
            assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}


def test_the_chart_adds_no_capability_as_a_user_who_is_not_root_gets_none() -> None:
    for template in (DEPLOY / "helm" / "templates").iterdir():
        text = template.read_text()
        assert "add: [" not in text
        assert text.count("runAsUser: 10001") == text.count("drop: [ALL]")


def test_without_monitoring_only_pods_of_the_same_release_reach_instances() -> None:
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "plain.yaml").read_text())
    [policy] = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == INSTANCES_POLICY]
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            assert set(peer) == {"podSelector"}
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "p2p"


def test_proxies_reach_the_kv_events_of_every_data_parallel_rank() -> None:
    helm_python = pytest.importorskip("helm_python")
    with helm_python.Chart.load(DEPLOY / "helm") as chart:
        values = {"kvEvents": {"enabled": True}}
        files = chart.render(values, name="p2p", namespace="default")
    manifests = [m for text in files.values() for m in yaml.safe_load_all(text) if m]
    [policy] = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == INSTANCES_POLICY]
    ranges = [
        (port["port"], port["endPort"])
        for rule in policy["spec"]["ingress"]
        for port in rule.get("ports", ())
        if "endPort" in port
    ]
    published = []
    for manifest in manifests:
        for container in manifest["spec"].get("template", {}).get("spec", {}).get("containers", ()):
            if text := option_value(container.get("args", []), "--kv-events-config"):
                config = json.loads(text)
                places = (config["endpoint"], config["replay_endpoint"])
                published.append([int(place.rpartition(":")[2]) for place in places])
    assert len(published) == 2
    for first, replayed in published:
        for rank in range(replayed - first):
            for port in (first + rank, replayed + rank):
                assert any(low <= port <= high for low, high in ranges)


def test_series_of_two_proxies_that_speak_of_one_instance_stay_apart() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    [job] = [job for job in jobs if job.get("honor_labels")]
    [relabel] = job["relabel_configs"]
    assert relabel == {"source_labels": ["__address__"], "target_label": "proxy"}


def test_the_sidecar_of_llm_d_knows_its_options_and_finds_its_instance() -> None:
    found = 0
    for pod in pods(DEPLOY / "kubernetes" / "llm-d.yaml"):
        for sidecar in pod.get("initContainers", ()):
            assert (
                sidecar["image"] == f"ghcr.io/llm-d/llm-d-router-disagg-sidecar:{SIDECAR_RELEASE}"
            )
            given = dict(word.split("=") for word in sidecar["args"])
            assert set(given) <= SIDECAR_OPTIONS
            [instance] = pod["containers"]
            assert f"--port={given['--model-server-port']}" in instance["args"]
            found += 1
    assert found == 1
