"""Render the chart, and hold everything in deploy/ against the schemas of what reads it.

`python scripts/deploy.py render` writes deploy/kubernetes/plain.yaml; `check` says what is wrong,
and what could not be checked here. Both need the extra `deploy`.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
PLAIN = DEPLOY / "kubernetes" / "plain.yaml"
KUBERNETES = ("1.30", "1.34")
EVERYTHING = {
    "monitoring": {"enabled": True},
    "autoscaling": {"enabled": True},
    "kvEvents": {"enabled": True},
    "hubSecret": "hub",
    "proxy": {"environment": [{"name": "OTEL_SERVICE_NAME", "value": "front"}]},
    "instance": {
        "shareHost": True,
        "rdma": {"rdma/hca": 1},
        "connector": {"layerwise": True},
        "environment": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "models": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "decode": {"hosts": 2, "gpus": 8},
}
# Models that were made of the definitions of these kinds.
MODELS = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}
HEADER = "# Made of deploy/helm with its default values, by `make deploy`.\n"


def render(values: dict[str, Any]) -> str:
    """Return the chart's manifests, in the order of their files."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name="p2p", namespace="default")
    texts = (files[name].strip().removeprefix("---").strip() for name in sorted(files))
    return HEADER + "---\n" + "\n---\n".join(text for text in texts if text) + "\n"


def problems_of(manifest: dict[str, Any]) -> Iterator[str]:
    """Say what is wrong with one manifest, and if nobody knows its kind."""
    kind, where = manifest["kind"], f"{manifest['kind']}/{manifest['metadata']['name']}"
    if kind in MODELS:
        try:
            getattr(importlib.import_module(MODELS[kind]), kind).model_validate(manifest)
        except ValueError as error:
            yield f"{where}: {error}"
    elif "." in manifest["apiVersion"].partition("/")[0].removesuffix(".k8s.io"):
        print(f"not checked: {where}, no schema of {manifest['apiVersion']} is to be had")  # noqa: T201
    else:
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{where}: Kubernetes {version}: {error.message} at {list(error.path)}"


def check_manifests() -> Iterator[str]:
    """Check the chart with little and with everything, and the manifests that were written."""
    for values in ({}, EVERYTHING):
        report = helm_python.lint(CHART, values, strict=True, kube_version=f"v{KUBERNETES[0]}.0")
        yield from (item["error"] for item in report["messages"] if item["severity"] > 1)
    if PLAIN.read_text() != render({}):
        yield f"{PLAIN.relative_to(ROOT)} is old: make deploy"
    texts = [render(EVERYTHING), *(p.read_text() for p in sorted(PLAIN.parent.glob("*.yaml")))]
    for text in texts:
        for manifest in yaml.safe_load_all(text):
            yield from problems_of(manifest)


def check_by_programs() -> Iterator[str]:
    """Run the validators that are programs; one that is not on this machine is named."""
    units = sorted(map(str, (DEPLOY / "systemd").glob("*.service")))
    with tempfile.TemporaryDirectory() as root:
        commands = [
            ["hadolint", *sorted(map(str, (DEPLOY / "docker").glob("*")))],
            ["yamllint", "--strict", "--config-file", str(DEPLOY / "yamllint.yml"),
             str(DEPLOY / "kubernetes"), *map(str, CHART.glob("*.y*ml"))],
            ["check-jsonschema", "--builtin-schema", "vendor.github-workflows",
             *map(str, (ROOT / ".github" / "workflows").glob("*.yml"))],
            ["promtool", "check", "rules", str(CHART / "alerts.yml")],
            ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")],
            ["systemd-analyze", "verify", "--man=no", "--generators=no", *units],
        ]  # fmt: skip
        for command in commands:
            if shutil.which(command[0]) is None:
                print(f"not checked: {command[0]} is not on this machine")  # noqa: T201
                continue
            outcome = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
            if outcome.returncode:
                yield f"{command[0]}: {outcome.stdout}{outcome.stderr}"


def main() -> int:
    """Run what the argument names."""
    if sys.argv[1:] == ["render"]:
        PLAIN.write_text(render({}))
        return 0
    problems = [*check_manifests(), *check_by_programs()]
    print(*problems, sep="\n")  # noqa: T201
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
