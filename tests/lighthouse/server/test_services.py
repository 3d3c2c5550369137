"""Handlers of RPCs, called without a server."""

import asyncio
import json
import math
import time
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from pathlib import Path

import pytest

from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.ledger import Ledger
from lighthouse.job.records import Group, QuorumConfig
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse.server.chaos import ChaosService
from lighthouse.server.services import IncidentService
from lighthouse.store.ledger_files import LedgerFiles
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.pb.extensions.chaos_pb2 import InjectRequest
from lighthouse_protocol.pb.extensions.incident_pb2 import LedgerRequest
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.timing.pacing import CHEAP_S


async def test_a_report_during_a_write_of_the_ledger_misses_nothing(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    class Files(LedgerFiles):
        """The ledger is written right after the files have been read."""

        def read(self, page: str) -> tuple[list[str], str]:
            found = super().read(page)
            with suppress(Late):
                asyncio.run_coroutine_threadsafe(service.write_ledger(), loop).result(0.2)
            return found

    registry = IncidentRegistry()
    jobs = JobRegistry(QuorumConfig(), Ports(loop, loop.time), incident_registry=registry)
    service = IncidentService(jobs, registry, Files(tmp_path))
    registry.ledger.observe_group("j", Group("a", "i1", 0.0, Participant("a")), loop.time() - 100)
    answer = await service.ledger(LedgerRequest(), Call(None, "ipv4:127.0.0.1:5", {}))
    [line] = map(json.loads, answer.lines)
    assert line["group"] == "a"


async def test_reports_of_a_large_ledger_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    """With 10,000 groups its lines take a second; a written line is not sent again."""
    loop = asyncio.get_running_loop()
    built: list[float] = []

    class Large(Ledger):
        def take_lines(self, now: float, unix_s: float) -> list[str]:
            built.append(now)
            time.sleep(2 * CHEAP_S)
            return super().take_lines(now, unix_s)

    registry = IncidentRegistry(ledger=Large())
    jobs = JobRegistry(QuorumConfig(), Ports(loop, loop.time), incident_registry=registry)
    service = IncidentService(jobs, registry, LedgerFiles(tmp_path))
    registry.ledger.observe_group("j", Group("a", "i1", 0.0, Participant("a")), loop.time() - 100)

    async def report() -> list[str]:
        return list((await service.ledger(LedgerRequest(), Call(None, "ipv4:127.0.0.1:5", {}))).lines)

    assert [len(await report()) for _ in range(3)] == [1, 1, 1]
    assert len(built) == 1
    await service.write_ledger()
    [written, since] = map(json.loads, await report())
    assert written["to"] <= since["from"]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 61.0])
async def test_a_fault_of_a_length_that_is_not_allowed_is_refused(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    service = ChaosService(JobRegistry(QuorumConfig(), Ports(loop, loop.time)), is_allowed=True)
    request = InjectRequest(job="j", replica_id="a", kind="cut", seconds=seconds)
    with pytest.raises(InvalidRequest, match=r"^seconds: "):
        await service.inject(request, Call(None, "ipv4:127.0.0.1:5", {}))
