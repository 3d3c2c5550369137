"""A real Slurm of two nodes on this machine; the processes of each node have a namespace, and end with it."""

import contextlib
import os
import random
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.processes import LOCALHOST, Process, clean_environment, eventually

from .tools import DEPLOY, missing, run, tool

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
NODES = ("n0", "n1")

_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
_ALONE = ("unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")

# Root and no secrets: it is for this host alone, and lives as long as a test.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_min_interval=0
NodeName={nodes[0]} NodeHostname={host} NodeAddr={address} Port={node_0}
NodeName={nodes[1]} NodeHostname={host} NodeAddr={address} Port={node_1}
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._configuration = folder / "slurm.conf"
        self._environment = clean_environment(
            SLURM_CONF=str(self._configuration),
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            LIGHTHOUSE_MANAGER_BIND=f"{LOCALHOST}:0",
            LIGHTHOUSE_MANAGER_STORE=f"{LOCALHOST}:1",
            LIGHTHOUSE_MANAGER_MAX_STARTUP_FAILURES="0",
            NPROC_PER_NODE="1",
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if os.geteuid() != 0:
            missing("slurmd takes root")
        controller, *nodes = free_ports(3)
        self._configuration.write_text(
            _CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname(),
                address=LOCALHOST,
                nodes=NODES,
                controller=controller,
                node_0=nodes[0],
                node_1=nodes[1],
            )
        )
        with contextlib.ExitStack() as stack:
            for command in (["slurmctld", "-D", "-i"], *([*_ALONE, "slurmd", "-D", "-N", node] for node in NODES)):
                path = tool(command[0])
                stack.enter_context(Process(_EXEC, [path, *command[1:]], env=self._environment))
            eventually(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2", "two idle nodes")
            yield

    def submit(self, *arguments: str | Path, **environment: str) -> str:
        """The job's id; its output lies in the folder."""
        port, _ = free_ports(2)
        more = {"PORT": str(port), **environment}
        result = run([tool("sbatch"), "--parsable", SCRIPT, *arguments], cwd=self.folder, env=self._environment | more)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def ask(self, *command: str) -> str:
        return run([tool(command[0]), *command[1:]], env=self._environment).stdout.strip()

    def has_ended(self, job: str) -> tuple[str, str, str, str]:
        """Its state, exit status, how often it was requeued, and the last line of the batch script."""

        def ended() -> Sequence[str]:
            shown = self.ask("scontrol", "show", "job", job)
            fields = [re.search(rf"\b{name}=(\S+)", shown) for name in ("JobState", "ExitCode", "Restarts")]
            values = [found[1] for found in fields if found]
            return values if values[0] not in ("PENDING", "RUNNING", "COMPLETING") else []

        state, status, restarts = eventually(ended, f"the end of job {job}")
        *_, said = re.findall(r"^\d of \d.*", self.output(job), re.MULTILINE)
        return state, status, restarts, said

    def output(self, job: str) -> str:
        return (self.folder / f"lighthouse-{job}.out").read_text()


def free_ports(count: int) -> range:
    """Neighbours that nothing listens on, below those that the kernel gives out."""
    while True:
        first = random.randrange(20_000, 30_000)
        ports = range(first, first + count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
            return ports
