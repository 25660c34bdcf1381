"""Run the tests of this folder in an environment with Ray Serve LLM: `make test-ray`."""

from __future__ import annotations

import subprocess
import sys

from tests.compat.environments import ROOT, ensure_ray_environment, install_ours


def main() -> int:
    """Make the environment if it is not there, and run pytest in it; 0 when all is well."""
    python = ensure_ray_environment()
    install_ours(python)
    command = [str(python), "-m", "pytest", "tests/ray_serve", *sys.argv[1:]]
    command += ["-W", "ignore"]  # Ray's imports warn
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
