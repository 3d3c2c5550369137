"""The example for torchft users, as its users run it: two replica groups, a kill, a heal, equal weights."""

import re
from pathlib import Path

import pytest

from tests.agent_client.ranks import Pending, Rank, RankServer
from tests.processes import PATIENCE_S, ROOT, Lighthouse, eventually
from tests.torchft.stock import require

SCRIPT = ROOT / "examples" / "train_torchft.py"
STEPS = 60
KILLED_AT = 10

# What torchrun gives a rank: its place and its group's store.
LIKE_TORCHRUN = """
import os, pathlib, runpy, sys
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ |= {{
    "TORCHFT_LIGHTHOUSE": "http://{lighthouse}",
    "REPLICA_GROUP_ID": "{group}",
    "NUM_REPLICA_GROUPS": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": str(store.port),
    "RANK": "0",
    "WORLD_SIZE": "1",
}}
sys.path.insert(0, str(pathlib.Path({script!r}).parent))
sys.argv = ["train_torchft.py", "--steps", "{steps}", "--min-groups", "2"]
runpy.run_path({script!r}, run_name="__main__")
"""


class Group:
    def __init__(self, server: RankServer, lighthouse: Lighthouse, group: int, log: Path) -> None:
        self._log = log
        log.touch()
        self._rank: Rank = server.start("tests.agent_client.torchft.scripts:Script", log)
        code = LIKE_TORCHRUN.format(lighthouse=lighthouse.address, group=group, steps=STEPS, script=str(SCRIPT))
        self._run: Pending = self._rank.begin("run", code)

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+): 2 groups", self._log.read_text(), re.MULTILINE)]

    def wait_for_step(self, step: int) -> None:
        eventually(lambda: self.steps()[-1:] >= [step], f"step {step}:\n{self._log.read_text()}", 2 * PATIENCE_S)

    def kill(self) -> None:
        self._rank.kill()

    def ends_with(self) -> str:
        """Its last step and weights."""
        self._run.result(2 * PATIENCE_S)
        return self._log.read_text().partition("ends at step ")[2].splitlines()[0]


@pytest.mark.slow
def test_a_torchft_script_trains_through_a_kill_and_a_heal(tmp_path: Path) -> None:
    require()
    with RankServer() as server, Lighthouse("--min-replicas", "2", "--heartbeat-timeout", "600s") as lighthouse:
        stays = Group(server, lighthouse, 0, tmp_path / "stays")
        killed = Group(server, lighthouse, 1, tmp_path / "killed")
        groups = [stays, killed]
        try:
            killed.wait_for_step(KILLED_AT)
            killed.kill()
            groups.append(Group(server, lighthouse, 1, tmp_path / "again"))
            ends = [stays.ends_with(), groups[-1].ends_with()]
        finally:
            for group in groups:
                group.kill()
    assert ends[0] == ends[1]
    assert ends[0].startswith(f"{STEPS} with weights ")
    assert groups[-1].steps()[0] > KILLED_AT  # it was given the step and the state of the other


def test_what_is_new_in_it_are_an_import_and_a_call() -> None:
    lines = SCRIPT.read_text().splitlines()
    ours = [line for line in lines if re.search(r"agent_client|lighthouse_runtime|install\b", line)]
    assert ours == ["from agent_client.torchft import install", "install()"]
