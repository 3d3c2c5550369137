"""A training script that does as it is told, below supervisors that any scheduler may have started."""

from pathlib import Path

from tests.processes import eventually

_SCRIPT = """
import os, pathlib, sys, time

group = pathlib.Path(__file__).with_name(os.environ["REPLICA_GROUP_ID"])
guard_s_parent = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
if os.environ["RANK"] == "0":
    with open(f"{group}.attempts", "a") as attempts:
        attempts.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
order = pathlib.Path(f"{group}.order")
while os.environ["RANK"] != "0" or not order.exists():
    time.sleep(0.02)
told = order.read_text()
order.unlink()
if told == "kill":
    os.kill(guard_s_parent, 9)
    time.sleep(600)
sys.exit(int(told))
"""


class Training:
    """One script for all replica groups; its rank 0 obeys."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.script = folder / "train.py"
        self.script.write_text(_SCRIPT)

    def started(self, group: str, attempts: str) -> None:
        """Return once the group's ranks have started so often: each start is the attempt that its supervisor counts."""
        file = self._folder / f"{group}.attempts"
        eventually(lambda: file.exists() and file.read_text() == attempts, f"attempts {attempts} of group {group}")

    def tell(self, group: str, order: int | str) -> None:
        """End with this status, or `kill` the supervisor."""
        partial = self._folder / "partial"
        partial.write_text(str(order))
        partial.rename(self._folder / f"{group}.order")

    def survives(self, group: str) -> None:
        """A rank that fails is back by its supervisor; a supervisor that is killed, by what started it."""
        self.started(group, "0")
        self.tell(group, 1)
        self.started(group, "01")
        self.tell(group, "kill")
        self.started(group, "010")
