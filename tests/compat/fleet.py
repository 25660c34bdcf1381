"""A fleet whose instances run another vLLM than the one beside us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2p_engine.cli import commands
from p2p_engine.cli.commands import InstancePlan
from p2p_engine.cli.fleet import Fleet
from tests.compat.environments import CPU_BUILD

BOOT_SECONDS = 1200.0  # on a machine that others use as well; alone it is one minute
# Float32 and one core for each instance make tokens repeatable; CPU attention wants blocks of 32.
VLLM_ARGS = ("--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--block-size=32")
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # what is installed in the environment, not what lies in this folder
    "VLLM_CPU_KVCACHE_SPACE": "1",
    **CPU_BUILD,
}


class VersionFleet(Fleet):
    """Our launcher and proxy with the instances of `python`'s environment."""

    def __init__(
        self,
        model: Path,
        python: Path,
        *,
        send_type: str = "PUT_ASYNC",
        vllm_args: Sequence[str] = (),
        transfer_config: Mapping[str, Any] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """Plan a fleet; nothing is started yet."""
        self._python = python
        super().__init__(
            model,
            send_type=send_type,
            vllm_args=(*VLLM_ARGS, *vllm_args),
            transfer_config=transfer_config,
            env=ENVIRONMENT,
            log_dir=log_dir,
        )

    def _instance_command(self, plan: InstancePlan, overrides: Mapping[str, Any]) -> list[str]:
        _, *arguments = commands.vllm_command(plan, overrides)
        return [str(self._python), *arguments]
