"""A run that was stopped is shown as stopped, also when its processes have ended."""

from prometheus_client import CollectorRegistry

from lighthouse.job.restarts import Supervisors
from lighthouse.server.metrics import RunCollector, render
from lighthouse_protocol.messages.run import (
    RunCounters,
    RunStatus,
    RunStopped,
    RunTerms,
    SupervisorHeartbeat,
    SupervisorHello,
)
from tests.lighthouse.server.test_metrics import samples


def test_a_stopped_run_without_processes():
    stop = RunStopped("exit code 130", "g0", 1)
    run = RunStatus("j", "r", "stopped", RunCounters(), RunTerms(3), (), False, stop, (), (), ())
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: [run]))
    seen = samples(render(registry)[0].decode())
    assert (seen["lighthouse_run_stopped", "j", "r"], seen["lighthouse_run_supervisors", "j", "r"]) == (1, 0)


def test_the_budget_that_is_used_up_the_most():
    stage = Supervisors()
    for number, (name, used) in enumerate({"a": 0.25, "b": 0.75}.items()):
        stage.enter(SupervisorHello(name, f"{name}1"), number)
        stage.hear(number, SupervisorHeartbeat(used))
    assert stage.budget_used == 0.75
    stage.end(1)
    assert stage.budget_used == 0.25
