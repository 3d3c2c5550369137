"""The memory of a host's ranks, and what a status shows of it."""

import os
from dataclasses import replace

from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_runtime.process.kept_memory import BUFFERS, HEADER_BYTES, BufferHeader, write_header
from manager.supervisor.keepers import Keepers
from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.plan import LaunchPlan, Torchrun

PLAN = LaunchPlan(
    command=("train",),
    layout=Layout(2, 2),
    host=1,
    replica_id="a",
    job="default",
    run="default",
    incarnation="f00d",
    lighthouse="h:1",
    manager="h:2",
    master=("h", 3),
    max_restarts=3,
)


def paths(keepers: Keepers, rank: int) -> list[str]:
    return keepers.environment(rank)["LIGHTHOUSE_KEEPER"].split(":")


def kept(path: str, header: BufferHeader) -> None:
    buffer = os.open(path, os.O_RDWR)
    os.posix_fallocate(buffer, 0, HEADER_BYTES + header.length)
    write_header(buffer, header)
    os.close(buffer)


def test_each_rank_of_this_host_has_its_own_memory() -> None:
    keepers = Keepers(PLAN, 16)
    found = [paths(keepers, rank) for rank in (2, 3)]
    assert [len(each) for each in found] == [BUFFERS, BUFFERS]
    assert len({os.stat(path).st_ino for each in found for path in each}) == 2 * BUFFERS
    assert keepers.environment(2)["LIGHTHOUSE_KEEP_EVERY"] == "16"


def test_torchrun_gets_the_memory_of_all_its_ranks_in_their_order() -> None:
    keepers = Keepers(replace(PLAN, layout=Layout(2, 1), torchrun=Torchrun("0", 8)), 16)
    found = paths(keepers, 1)
    assert len(found) == 4 * BUFFERS
    kept(found[2 * BUFFERS], BufferHeader("it", 5, 1, 10))
    assert [each.rank for each in keepers.newest_states() if each.step] == [6]


def test_nothing_is_set_up_unless_it_is_asked_for() -> None:
    keepers = Keepers(PLAN, 0)
    assert (keepers.environment(2), keepers.newest_states()) == ({}, ())


def test_the_status_shows_the_newest_complete_state_and_why_there_is_none() -> None:
    keepers = Keepers(PLAN, 1)
    assert keepers.newest_states() == (KeptState(2), KeptState(3))
    one, other = paths(keepers, 2)
    kept(one, BufferHeader("it", 8, 3, 1000))
    kept(other, BufferHeader("it", 9, 3, 1001))
    assert keepers.newest_states()[0] == KeptState(2, 9, 1001)
    os.truncate(other, HEADER_BYTES + 1000)
    assert keepers.newest_states()[0] == KeptState(2, 8, 1000)
    kept(other, BufferHeader("it", 9, 3, problem="no memory"))
    assert keepers.newest_states()[0] == KeptState(2, 8, 1000, "no memory")
    kept(one, BufferHeader("it", 10, 3, 1002))
    assert keepers.newest_states()[0] == KeptState(2, 10, 1002), "the problem is over"


def test_the_memory_belongs_to_no_child() -> None:
    keepers = Keepers(PLAN, 1)
    buffers = [int(path.rpartition("/")[2]) for path in paths(keepers, 2)]
    assert [os.get_inheritable(buffer) for buffer in buffers] == [False, False]
