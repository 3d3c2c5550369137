"""A look at a process from outside: what it was, what is missing of it, and that it never takes too long."""

import asyncio
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_runtime.process.children import host_id, started_at
from manager.evidence import process_probe
from manager.evidence.process_probe import ELSEWHERE, NO_OUTPUT, probe, probe_alone, probe_with_output
from tests.processes import PATIENCE_S

SEEN = ProcessSnapshot("stacks", "pid 71: S (sleeping)", missing=("other: why",))
# This process offers nothing.
OWN = WatchHello(1, "w", os.getpid(), host_id(), started_at(os.getpid()))
GONE = replace(OWN, started=OWN.started + 1)


async def test_a_process_without_a_handler_is_sent_no_signal():
    seen = await probe(OWN)
    assert seen.process.startswith(f"pid {os.getpid()} (")
    assert (seen.stacks, seen.missing, seen.is_stopped) == ("", ("stacks: it has no handler that writes them",), False)
    seen = await probe(replace(OWN, offer=EvidenceOffer(64, 3)))
    assert seen.missing == ("stacks: it has no handler for signal 64 any more, and would end by it",)


async def test_a_pid_that_names_another_process_by_now():
    ended = f"{os.getpid()} has ended"
    assert await probe(GONE) == ProcessSnapshot(missing=(f"stacks: process {ended}", f"process: {ended}"))
    assert (await probe_alone(GONE, True)).missing[1:] == (f"process: {ended}", NO_OUTPUT)
    assert await probe_alone(OWN, False) == ProcessSnapshot(missing=(ELSEWHERE, NO_OUTPUT))


@pytest.mark.parametrize(
    ("lines", "output", "missing"),
    [
        (("one", "two"), ("one", "two"), ()),
        ((), (), ()),
        (None, (), ("output: its process is none of the supervisor's",)),
        ("never", (), ("output: its keeper has not answered within 0.05 s",)),
    ],
)
async def test_what_it_wrote_last(
    monkeypatch: pytest.MonkeyPatch,
    lines: tuple[str, ...] | str | None,
    output: tuple[str, ...],
    missing: tuple[str, ...],
):
    monkeypatch.setattr(process_probe, "_probe", lambda *_: SEEN)

    monkeypatch.setattr(process_probe, "OUTPUT_WITHIN_S", 0.05 if lines == "never" else PATIENCE_S)

    async def last() -> Any:
        return await asyncio.Future() if lines == "never" else lines

    seen = await probe_with_output(OWN, last())
    assert seen == replace(SEEN, output=output, missing=(*SEEN.missing, *missing))


async def test_a_proc_that_hangs_costs_nothing_else(monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    monkeypatch.setattr(process_probe, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process_probe, "_probe", lambda *_: go_on.wait(PATIENCE_S) and SEEN)
    seen = await probe(OWN)
    go_on.set()
    late = "/proc has not answered within 0.05 s"
    assert seen == ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


async def test_a_defect_here_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_probe, "_probe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await probe(OWN)
