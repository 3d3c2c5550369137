"""The alerts with a real Prometheus, a real lighthouse and three groups that train; then with one on a real etcd.

    python -m tests.deploy.live_alerts [FOLDER] [train|store ...]

Each fault is injected, and the time until its alert fires is printed. `for:` is shortened to a few seconds; nothing
else of the rules differs. FOLDER keeps Prometheus' data and its configuration.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.daemons.supervisors import Supervisor
from tests.deploy.test_prometheus import PROMETHEUS
from tests.etcd_cluster import etcd_cluster
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, eventually, http_json

FIRES_WITHIN_S = 240.0
FOR_S = 4
KILLS = 6
SCRIPT = """
import os, sys, time, torch
torch.set_num_threads(1)
from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, TrainState
model = torch.nn.Linear(256, 256)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
agent = Agent.from_env(state=TrainState(model, sgd))
ddp, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
while True:
    optimizer.zero_grad()
    ddp(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
    while os.path.exists(os.environ["HANGS"]):
        time.sleep(0.1)
"""


class Prometheus:
    def __init__(self, folder: Path, lighthouse_http: str, port: int = 19090) -> None:
        self.url = f"http://{LOCALHOST}:{port}"
        rules = re.sub(r"for: \w+", f"for: {FOR_S}s", (PROMETHEUS / "alerts.yaml").read_text())
        (folder / "alerts.yaml").write_text(rules)
        config = (PROMETHEUS / "prometheus.yaml").read_text()
        config = config.replace("lighthouse:29511", lighthouse_http.removeprefix("http://")).replace(": 5s", ": 1s")
        (folder / "prometheus.yaml").write_text(config)
        self._command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={LOCALHOST}:{port}",
            "--log.level=warn",
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator["Prometheus"]:
        with subprocess.Popen(self._command) as process:
            try:
                eventually(lambda: self._answers(), "Prometheus answers")
                yield self
            finally:
                process.terminate()
                process.wait(PATIENCE_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/-/ready", timeout=5) as answer:
            return answer.status == 200
        return False

    def firing(self) -> set[str]:
        with urllib.request.urlopen(self.url + "/api/v1/alerts", timeout=30) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def fires(self, name: str, fault: str) -> None:
        began_at = time.monotonic()
        eventually(lambda: name in self.firing(), f"{name} fires", within_s=FIRES_WITHIN_S)
        print(f"{name:28} fired {time.monotonic() - began_at:6.1f} s after: {fault}", flush=True)


def supervisor(lighthouse: Lighthouse, name: str, folder: Path) -> Supervisor:
    """Its rank hangs while the file `name` is in `folder`."""
    options = ("--max-restarts", "8", "--max-startup-failures", "0", "--restart-delay", "100ms", "--store", "auto")
    master = str(29710 + 10 * "abc".index(name))
    env = {"HANGS": str(folder / name)}
    words = [sys.executable, "-c", SCRIPT]
    options = (*options, "--master-port", master, "--stall-timeout", "5s")
    return Supervisor(lighthouse.address, *options, command=words, replica_id=name, env=env)


def step_of(lighthouse: Lighthouse) -> int:
    jobs = http_json(lighthouse.http + "/status")["jobs"]
    return max((member["step"] for job in jobs for member in job["members"]), default=0)


def participants(lighthouse: Lighthouse) -> int:
    jobs = http_json(lighthouse.http + "/status")["jobs"]
    return sum(member["is_participant"] for job in jobs for member in job["members"])


def trains(lighthouse: Lighthouse, groups: int) -> None:
    """They all do, and go on."""
    eventually(lambda: participants(lighthouse) == groups, f"{groups} groups train")
    begun = step_of(lighthouse)
    eventually(lambda: step_of(lighthouse) > begun + 5, "training goes on")


def rank_of(group: Supervisor) -> int:
    """The process of its rank."""
    store = set(group.stores())
    return eventually(
        lambda: next((pid for pid in group.below if pid not in store and _runs_script(pid)), 0), "its rank is there"
    )


def _runs_script(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"FaultTolerantOptimizer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def store(folder: Path) -> None:
    """One that serves all hosts without credentials, and loses its etcd while a group waits for a quorum."""
    exposed = ("--insecure", "--bind", "[::]:0", "--http", "[::]:0")
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(etcd_cluster())
        lighthouse = stack.enter_context(Lighthouse(*exposed, "--min-replicas", "2", "--store", etcd.store("alerts")))
        lighthouse.wait_for_log("this lighthouse leads")
        stack.enter_context(supervisor(lighthouse, "a", folder))
        eventually(lambda: http_json(lighthouse.http + "/status")["jobs"], "a has come")
        prometheus = stack.enter_context(Prometheus(folder, lighthouse.http, 19091).running())
        prometheus.fires("LighthouseInsecure", "--insecure on all addresses")
        etcd.kill()
        prometheus.fires("LighthouseStoreUnavailable", "SIGKILL to all three nodes of etcd")


def train(folder: Path) -> None:
    options = ("--min-replicas", "2", "--heartbeat-timeout", "3s", "--stall-timeout", "5s", "--join-timeout", "10s")
    with contextlib.ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse(*options))
        a, b, c = (stack.enter_context(supervisor(lighthouse, name, folder)) for name in "abc")
        prometheus = stack.enter_context(Prometheus(folder, lighthouse.http).running())
        try:
            trains(lighthouse, 3)
        except AssertionError:
            print(lighthouse.log(), a.log(), sep="\n")
            raise
        time.sleep(3 * FOR_S)
        print("firing while all train:", prometheus.firing() - {"LighthouseInsecure"} or "none", flush=True)

        (folder / "b").touch()
        prometheus.fires("LighthouseRankStalled", "the rank of b sleeps")
        (folder / "b").unlink()
        trains(lighthouse, 3)

        began_at = time.monotonic()
        for _ in range(KILLS):  # b is also lost, for as long as its rank takes to start
            os.kill(rank_of(b), signal.SIGKILL)
            eventually(lambda: participants(lighthouse) < 3, "b is lost")
            trains(lighthouse, 3)
        print(f"{KILLS} kills of the rank of b took {time.monotonic() - began_at:.0f} s", flush=True)
        prometheus.fires("LighthouseHealLoop", f"{KILLS} kills of the rank of b")
        prometheus.fires("LighthouseRestartBudgetLow", f"{KILLS} of 8 restarts")

        eventually(lambda: "LighthouseGroupLost" not in prometheus.firing(), "b is known to be back")
        c.kill()
        prometheus.fires("LighthouseGroupLost", "SIGKILL to the supervisor of c")
        b.kill()
        prometheus.fires("LighthouseNoQuorum", "SIGKILL to the supervisor of b: one group is left of at least two")
        lighthouse.kill()
        prometheus.fires("LighthouseDown", "SIGKILL to the lighthouse")
        a.kill()


PARTS = {"train": train, "store": store}


def main(words: Sequence[str]) -> None:
    parts = [word for word in words if word in PARTS] or list(PARTS)
    with tempfile.TemporaryDirectory() as temporary:
        parent = next((Path(word) for word in words if word not in PARTS), Path(temporary))
        for part in parts:
            (parent / part).mkdir()
            PARTS[part](parent / part)


if __name__ == "__main__":
    main(sys.argv[1:])
