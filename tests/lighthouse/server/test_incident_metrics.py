"""Times to detect and to recover, as a scrape shows them."""

from prometheus_client import CollectorRegistry

from lighthouse.job.incident_driver import BOUNDS_S, IncidentTimes
from lighthouse.server.metrics import IncidentCollector, render
from lighthouse_protocol.messages.incident import IncidentKind
from tests.lighthouse.server.test_metrics import samples


def test_times_by_job_and_kind():
    times = IncidentTimes()
    times.detected("j", IncidentKind.STALL, 61.0)
    times.detected("j", IncidentKind.LOSS, 0.0)
    times.detected("j", IncidentKind.LOSS, 0.04)
    times.recovered("j", IncidentKind.LOSS, 700.0)
    registry = CollectorRegistry()
    registry.register(IncidentCollector(times))
    seen = samples(render(registry)[0].decode())
    assert seen["lighthouse_incident_detection_seconds_count", "j", "loss"] == 2
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "loss", "0.01"] == 1
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "stall", "60.0"] == 0
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "stall", "120.0"] == 1
    assert seen["lighthouse_incident_recovery_seconds_bucket", "j", "loss", "600.0"] == 0
    assert seen["lighthouse_incident_recovery_seconds_sum", "j", "loss"] == 700.0
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.01, 600.0)


def test_a_job_without_an_incident_has_zeros_for_every_kind():
    times = IncidentTimes()
    times.began("j", IncidentKind.LOSS)
    registry = CollectorRegistry()
    registry.register(IncidentCollector(times, lambda: ["j", "new"]))
    seen = samples(render(registry)[0].decode())
    counted = {kind: seen["lighthouse_incidents_total", "j", kind] for kind in IncidentKind}
    assert counted == dict.fromkeys(IncidentKind, 0) | {IncidentKind.LOSS: 1}
    assert [seen["lighthouse_incidents_total", "new", kind] for kind in IncidentKind] == [0] * len(IncidentKind)
    assert seen["lighthouse_incident_recovery_seconds_count", "new", "stall"] == 0
