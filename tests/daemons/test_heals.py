"""A rank's heal, through its manager and the lighthouse, as status, metrics and log show it."""

import json
from contextlib import closing

import pytest

from agent_client.manager_client.client import ManagerConnection
from agent_client.progress.progress import Progress
from lighthouse_protocol.messages.status import MemberState, MemberStatus
from lighthouse_runtime.client.clients import LighthouseClient
from tests.processes import LIGHTHOUSE_CODE, PATIENCE_S, Lighthouse, Manager, eventually, http_get, run_cli

pytestmark = pytest.mark.slow

MIB = 2**20


def test_a_heal_is_shown_while_it_goes_on_and_told_when_it_is_over() -> None:
    progress = Progress()
    with Lighthouse() as lighthouse, Manager(lighthouse.address, "b", ranks=1) as manager:
        link = ManagerConnection(
            manager.address, 0, "w", lambda quorum_id, reason: None, returns_within_s=0.0, progress=progress
        )
        with closing(link), LighthouseClient(lighthouse.address) as client:

            def member() -> MemberStatus:
                [job] = client.status().jobs
                return job.members[0]

            link.ask(0, "", tag_quorum_id=0, commit_failures=0, timeout_s=PATIENCE_S)
            mark = progress.activity.heal_begins("a", 17)
            mark.record_bytes("a", 300 * MIB, 1000 * MIB)
            eventually(lambda: member().state is MemberState.HEALING, "it heals")
            heal = member().heal
            assert heal is not None
            assert (heal.source, heal.step, heal.received, heal.total) == ("a", 17, 300 * MIB, 1000 * MIB)
            assert heal.text.startswith("healing from a: 300 of 1000 MiB")
            arguments = ("--lighthouse", lighthouse.address)
            assert "  b is healing from a: 300 of 1000 MiB" in run_cli(LIGHTHOUSE_CODE, "status", *arguments).stdout
            shown = json.loads(run_cli(LIGHTHOUSE_CODE, "status", "--format", "json", *arguments).stdout)
            told = json.loads(http_get(f"{lighthouse.http}/status")[1])
            numbers = ("source", "step", "received", "total")
            for answer in (shown, told):
                found = answer["jobs"][0]["members"][0]["heal"]
                assert [found[name] for name in numbers] == ["a", 17, 300 * MIB, 1000 * MIB]
            metrics = http_get(f"{lighthouse.http}/metrics")[1]
            assert 'lighthouse_heal_remaining_bytes{job="default"} 7.340032e+08' in metrics  # 700 MiB
            assert 'lighthouse_members{job="default",state="healing"} 1.0' in metrics

            mark.record_bytes("a", 1000 * MIB, 1000 * MIB)
            mark.mark_done()
            lighthouse.wait_for_log(r"b: healing from a at step 17$")
            lighthouse.wait_for_log(r"b: healed from a at step 17: 1000 MiB in .* s \(.*/s\)$")
            assert member().state is MemberState.PARTICIPANT
            assert member().heal is None
