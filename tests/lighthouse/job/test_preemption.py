"""What the lighthouse makes of a group's notice: an answer, an entry in the status and a call to the webhook."""

import pytest

from lighthouse.job import driver
from lighthouse.job.driver import JobDriver
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig
from lighthouse.job.run_driver import Ports
from lighthouse_protocol.messages.preemption import PreemptionNoted, PreemptionNotice, PreemptionReport
from lighthouse_protocol.messages.session import STARTING, GroupReport, Heartbeat, Hello, JoinRequest, Leave
from lighthouse_protocol.messages.status import PreemptionStatus, TimelineKind
from tests.lighthouse.peers import Listener
from tests.lighthouse.sessions import native, secret_of
from tests.virtual_loop import VirtualLoop


class Stage:
    def __init__(self, names: str = "abc") -> None:
        self.loop = VirtualLoop()
        self.posted: list[tuple[str, str, PreemptionNotice]] = []
        ports = Ports(self.loop, self.loop.time, preempted=lambda *given: self.posted.append(given))
        self.driver = JobDriver("j", QuorumMachine(QuorumConfig(min_replicas=1)), ports)
        self.peers: dict[str, Listener] = {}
        self.sessions: dict[str, int] = {}
        for name in names:
            self.open(name)

    def open(self, name: str, report: GroupReport | None = None) -> None:
        self.peers[name] = Listener()
        hello = Hello(native(name), report or GroupReport(), secret_of(name))
        self.sessions[name] = self.driver.open_session(hello, self.peers[name])

    def tell(self, name: str, left_s: float | None = 60, *, is_advice: bool = False) -> None:
        ends_at = None if left_s is None else self.loop.now + left_s
        notice = PreemptionNotice("aws", "spot", f"host-{name}", ends_at, is_advice)
        self.driver.receive_from_manager(self.sessions[name], PreemptionReport(notice))

    def others(self, name: str) -> list[int]:
        """The answers that the group has got."""
        return [each.others for each in self.peers[name].messages if isinstance(each, PreemptionNoted)]

    def shown(self) -> dict[str, PreemptionStatus | None]:
        return {member.replica_id: member.preemption for member in self.driver.status().members}


def test_it_counts_the_groups_that_stay_and_exactly_one_of_all_is_the_last():
    stage = Stage()
    stage.tell("b")
    assert stage.others("b") == [2]
    for name in "ac":
        stage.tell(name)
    assert [stage.others(name)[-1] for name in "abc"] == [0, 0, 0]
    assert [min(stage.others(name)[:1]) for name in "bac"] == [2, 1, 0], "answers are in order"


def test_only_groups_that_can_train_stay():
    stage = Stage("ab")
    stage.open("s", GroupReport(down=STARTING))
    stage.tell("b")
    assert stage.others("b") == [1]
    stage.driver.receive_from_manager(stage.sessions["a"], Heartbeat(1, GroupReport(drains=True)))
    assert stage.others("b")[-1] == 0


@pytest.mark.parametrize("ends", ["leaves", "is lost"])
def test_the_answer_is_repeated_when_another_group_goes(ends: str):
    stage = Stage("ab")
    stage.tell("b")
    if ends == "leaves":
        stage.driver.receive_from_manager(stage.sessions["a"], Leave("done"))
    else:
        stage.driver.end_session(stage.sessions["a"])
        stage.loop.go(60)
    assert stage.others("b")[0] == 1
    assert stage.others("b")[-1] == 0


def test_the_answer_is_repeated_when_a_replacement_trains():
    stage = Stage("ab")
    stage.tell("b")
    stage.driver.receive_from_manager(stage.sessions["a"], Leave("done"))
    stage.open("c")
    for name in "bc":
        stage.driver.receive_from_manager(stage.sessions[name], JoinRequest(1, native(name), 60.0))
    assert stage.driver.status().quorum_id > 0
    assert stage.others("b") == [1, 0, 1]


def test_without_notices_a_loss_does_not_look_for_them(monkeypatch: pytest.MonkeyPatch):
    looked: list[object] = []
    stage = Stage("abc")
    monkeypatch.setattr(driver, "staying_groups", looked.append)
    stage.driver.receive_from_manager(stage.sessions["a"], Leave("done"))
    assert looked == []


def test_a_group_with_advice_stays():
    stage = Stage("ab")
    stage.tell("a", None, is_advice=True)
    stage.tell("b")
    assert (stage.others("a"), stage.others("b")) == ([1, 0], [1])


def test_the_status_tells_the_time_left_and_each_notice_is_posted_once():
    stage = Stage("ab")
    stage.tell("b")
    stage.loop.go(2.5)
    assert stage.shown() == {"a": None, "b": PreemptionStatus("aws", "spot", "host-b", 57.5, is_advice=False)}
    stage.driver.receive_from_manager(stage.sessions["b"], PreemptionReport(stage.posted[0][2]))
    assert [given[:2] for given in stage.posted] == [("j", "b")]
    entries = stage.driver.status(has_ranks=True).timeline
    assert [entry.text for entry in entries if entry.kind is TimelineKind.NOTICE] == ["ends in 60 s: spot (aws)"]
    stage.driver.receive_from_manager(stage.sessions["b"], PreemptionReport(None))
    assert stage.shown() == {"a": None, "b": None}


def test_a_new_session_forgets_the_notice_until_its_manager_repeats_it():
    stage = Stage("ab")
    stage.tell("b")
    stage.open("b")
    assert stage.shown()["b"] is None
    stage.tell("b")
    assert str(stage.shown()["b"]) == "ends in 60 s: spot (aws)"
    assert len(stage.posted) == 1, "a repeated notice is posted once"
    stage.tell("b", None)
    assert str(stage.shown()["b"]) == "ends soon: spot (aws)"
    assert len(stage.posted) == 2


def test_a_group_is_answered_again_only_when_the_first_other_stays_or_the_last_goes():
    names = "abcdefgh"
    stage = Stage(names)
    for name in names:
        stage.tell(name)
    assert [stage.others(name) for name in names] == [*([left, 0] for left in range(7, 0, -1)), [0]]
    stage.driver.receive_from_manager(stage.sessions["a"], PreemptionReport(None))
    assert [stage.others(name)[-1] for name in names] == [0, *([1] * 7)]
