"""Stacks by a signal: of a process that has a handler, and never of another one."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from lighthouse_protocol.messages.session import EvidenceOffer
from lighthouse_runtime.process.children import process_descriptor, started_at
from manager.evidence.process_probe import NoStacksError, read_process, take_stacks
from tests.processes import PATIENCE_S, Process, eventually

NUMBER = signal.SIGRTMIN + 12
# On SIGUSR1 it does what its argument says.
STAND_IN = f"""
import faulthandler, fcntl, os, signal, sys, time
import lighthouse_protocol.messages.incident
file = os.memfd_create(lighthouse_protocol.messages.incident.STACKS_FILE)
fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
faulthandler.register({NUMBER}, file=file)
def change(*_):
    if sys.argv[1] == "unregister":
        faulthandler.unregister({NUMBER})
    else:
        os.dup2(os.open("/dev/null", os.O_RDWR), file)
    print("changed", flush=True)
signal.signal(signal.SIGUSR1, change)
def stuck_in_here():
    print("descriptor", file, flush=True)
    while True:
        time.sleep(60)
stuck_in_here()
"""


class StandIn(Process):
    def __init__(self, change: str = "") -> None:
        super().__init__(STAND_IN, [change])

    def ready(self) -> None:
        self.offer = EvidenceOffer(NUMBER, int(self.wait_for_log(r"^descriptor (\d+)$")[1]))

    def change(self) -> None:
        self.signal(signal.SIGUSR1)
        self.wait_for_log("^changed$")

    def stacks(self, offer: EvidenceOffer | None = None, within_s: float = PATIENCE_S) -> str:
        with process_descriptor(self.pid, started_at(self.pid)) as descriptor:
            assert descriptor is not None
            return take_stacks(descriptor, read_process(self.pid), offer or self.offer, within_s)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as process:
        yield process


def test_what_a_process_does_as_often_as_it_is_asked(stand_in: StandIn):
    for _ in range(2):
        stacks = stand_in.stacks()
        assert "in stuck_in_here" in stacks
        assert stacks.count("in <module>") == 1, "those of earlier times are gone"
    assert stand_in.is_alive


@pytest.mark.parametrize(("change", "why"), [("unregister", "would end by it"), ("close", "has closed the file")])
def test_a_process_that_has_no_handler_any_more_is_never_signalled(change: str, why: str):
    with StandIn(change) as process:
        assert read_process(process.pid).handles(NUMBER)
        process.change()
        with pytest.raises(NoStacksError, match=why):
            process.stacks()
        assert process.is_alive


def test_a_stopped_process_is_not_waited_for(stand_in: StandIn):
    began_at = time.monotonic()
    with stand_in.paused():
        eventually(lambda: read_process(stand_in.pid).is_stopped)
        with pytest.raises(NoStacksError, match="it is stopped"):
            stand_in.stacks()
    assert time.monotonic() - began_at < PATIENCE_S / 2


def test_one_that_offers_no_handler_or_one_that_writes_nothing(stand_in: StandIn):
    """SIGUSR1 is handled, too, but writes to the log."""
    with pytest.raises(NoStacksError, match="no handler that writes them"):
        stand_in.stacks(EvidenceOffer())
    with pytest.raises(NoStacksError, match=r"written nothing within 0\.1 s"):
        stand_in.stacks(EvidenceOffer(signal.SIGUSR1, stand_in.offer.descriptor), 0.1)


def test_one_that_has_ended(stand_in: StandIn):
    pid, started, state = stand_in.pid, started_at(stand_in.pid), read_process(stand_in.pid)
    with contextlib.ExitStack() as held:
        descriptor = held.enter_context(process_descriptor(pid, started))
        assert descriptor is not None
        os.kill(pid, signal.SIGKILL)
        stand_in.wait()
        with pytest.raises(NoStacksError, match=f"of process {pid}: "):
            take_stacks(descriptor, state, stand_in.offer, PATIENCE_S)
    with process_descriptor(pid, started) as gone:
        assert gone is None
