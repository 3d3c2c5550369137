"""A run knows its supervisors and ranks by their secrets: another process takes no name, slot or incarnation of theirs,
sets no key and reports no rank as lost. `handle` is fed as the driver feeds it."""

from dataclasses import replace

import pytest

from lighthouse.job import events
from lighthouse.job.generations import NAMES_KEPT_S
from lighthouse.job.records import Membership, RunConfig, dump_run, parse_run
from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse.job.store import MemoryStore
from lighthouse_protocol.messages import run
from lighthouse_protocol.refusals import DuplicateReplica, NotPermitted, WrongState
from tests.lighthouse.job.test_restarts import again, refusal, told
from tests.lighthouse.peers import Listener, NoJobs
from tests.lighthouse.run_stage import running
from tests.virtual_loop import VirtualLoop

OURS, THEIRS = "known to this supervisor and its ranks", "what another supervisor would show"
SUPERVISOR = run.SupervisorHello("g", "s", "h1", (0, 1), OURS)
RANK = run.RankHello(run.RankId(0, "s.i"), run.RunTerms(world_size=2), host="h1", secret=OURS)


def supervised(machine: RunMachine | None = None, now: float = 0.0) -> RunMachine:
    machine = machine or RunMachine()
    assert told(machine.handle(events.SupervisorJoined(SUPERVISOR, 1), now), 1) == run.SupervisorWelcome(1.0)
    return machine


def why(machine: RunMachine, hello: run.SupervisorHello, session: int = 9, now: float = 1.0) -> type | None:
    answer = told(machine.handle(events.SupervisorJoined(hello, session), now), session)
    return type(answer.error) if isinstance(answer, run.HelloRejected) else None


class TestSupervisors:
    @pytest.mark.parametrize("incarnation", ["s", "another"])
    @pytest.mark.parametrize("secret", ["", THEIRS])
    def test_a_name_is_its_supervisors_while_that_is_there(self, incarnation: str, secret: str):
        machine = supervised()
        stranger = replace(SUPERVISOR, incarnation=incarnation, host="h2", secret=secret)
        answer = refusal(told(machine.handle(events.SupervisorJoined(stranger, 9), 1.0), 9))
        assert isinstance(answer, DuplicateReplica)
        assert all(word in str(answer) for word in ("h1", "h2", "as soon as the lighthouse has detected"))
        assert machine.supervisors.connected_incarnations == {"s"}

    def test_the_name_is_free_when_its_stream_has_ended_and_its_incarnation_is_not(self):
        machine = supervised()
        machine.handle(events.SupervisorEnded(1), 1.0)
        assert why(machine, replace(SUPERVISOR, secret=THEIRS)) is DuplicateReplica
        assert why(machine, replace(SUPERVISOR, incarnation="2", secret=THEIRS)) is None

    def test_after_a_restart_of_the_lighthouse_it_is_kept_for_a_while(self):
        machine = again(supervised())  # at 5
        another = replace(SUPERVISOR, incarnation="2", secret=THEIRS)
        assert why(machine, another, now=5 + 0.9 * NAMES_KEPT_S) is DuplicateReplica
        assert why(machine, SUPERVISOR, now=5 + 0.9 * NAMES_KEPT_S) is None
        assert why(again(supervised()), another, now=5.1 + NAMES_KEPT_S) is None
        machine = again(supervised())
        machine.handle(events.ProcessPaused(9.0), 14.0)
        assert why(machine, another, now=14 + 0.9 * NAMES_KEPT_S) is DuplicateReplica

    def test_nor_is_another_told_the_stop_that_it_was_told(self):
        machine = supervised()
        machine.handle(events.StopAsked("enough", "operator"), 1.0)
        machine.handle(events.ResumeAsked(), 1.0)
        assert why(machine, replace(SUPERVISOR, secret=THEIRS)) is DuplicateReplica
        assert isinstance(told(machine.handle(events.SupervisorJoined(SUPERVISOR, 3), 1.0), 3), run.RunStopped)

    def test_the_record_has_no_secret(self):
        machine = supervised()
        machine.handle(events.RankJoined(RANK, 5), 0.0)
        assert OURS.encode() not in dump_run(machine.make_record(1.0))
        assert OURS not in repr(SUPERVISOR) + repr(RANK)


class TestRanks:
    def entered(self) -> RunMachine:
        machine = supervised()
        machine.handle(events.RankJoined(RANK, 5), 0.0)
        return machine

    @pytest.mark.parametrize("rank", [RANK.rank, run.RankId(0, "another")])
    @pytest.mark.parametrize("attempt", [0, 7])
    @pytest.mark.parametrize("secret", ["", THEIRS])
    def test_a_slot_is_its_ranks_while_that_is_there(self, rank: run.RankId, attempt: int, secret: str):
        machine = self.entered()
        stranger = replace(RANK, rank=rank, attempt=attempt, secret=secret)
        assert isinstance(machine.generations.ranks.check_owner(stranger, 1.0), DuplicateReplica)

    def test_the_next_start_by_its_supervisor_takes_it(self):
        machine = self.entered()
        assert machine.generations.ranks.check_owner(replace(RANK, rank=run.RankId(0, "s.j"), attempt=1), 1.0) is None

    def test_it_is_free_when_its_stream_has_ended_and_its_incarnation_is_not(self):
        machine = self.entered()
        machine.handle(events.SessionEnded(5), 1.0)
        assert isinstance(machine.generations.ranks.check_owner(replace(RANK, secret=THEIRS), 1.0), DuplicateReplica)
        assert machine.generations.ranks.check_owner(replace(RANK, rank=run.RankId(0, "x"), secret=THEIRS), 1.0) is None

    def test_after_a_restart_of_the_lighthouse_it_is_kept_for_a_while(self):
        machine = RunMachine(RunConfig(), record=parse_run(dump_run(self.entered().make_record(5.0))), now=5.0)
        another = replace(RANK, rank=run.RankId(0, "x"), attempt=3, secret=THEIRS)
        assert isinstance(machine.generations.ranks.check_owner(another, 5 + 0.9 * NAMES_KEPT_S), DuplicateReplica)
        assert machine.generations.ranks.check_owner(RANK, 5 + 0.9 * NAMES_KEPT_S) is None
        assert machine.generations.ranks.check_owner(another, 5.1 + NAMES_KEPT_S) is None
        machine.handle(events.ProcessPaused(9.0), 14.0)
        assert isinstance(machine.generations.ranks.check_owner(another, 14 + 0.9 * NAMES_KEPT_S), DuplicateReplica)

    @pytest.mark.parametrize("by", ["another", "nobody", ""])
    def test_only_its_own_supervisor_can_say_that_it_is_lost(self, by: str):
        machine = self.entered()
        machine.handle(events.SupervisorJoined(run.SupervisorHello("another", "t", "h2", (1,), THEIRS), 2), 0.0)
        machine.handle(events.RankLost(RANK.rank, "SIGKILL", by=by), 1.0)
        assert machine.generations.ranks.find_live(RANK.rank) is not None
        machine.handle(events.RankLost(RANK.rank, "SIGKILL", by="g"), 1.0)
        assert machine.generations.ranks.find_live(RANK.rank) is None


STOP, EXCLUDE = run.StopAsked("a stranger says so"), run.HostExcluded("a stranger says so")
STRANGER = run.SupervisorHello("z", "z", "h1", (), THEIRS)


def asked(
    machine: RunMachine, session: int, message: run.StopAsked | run.HostExcluded, membership: Membership
) -> list[events.RunEffect]:
    return list(machine.handle(events.SupervisorAsked(session, message, membership), 2.0))


class TestStrangersUnderANameOfTheirOwn:
    """Rule 4 of supervisors.py. A stranger's supervisor stopped every run that it could name, and kept hosts out of
    it."""

    def running(self) -> RunMachine:
        """g, with the two ranks of the generation, and z, which has none."""
        machine = supervised()
        for slot in (0, 1):
            machine.handle(
                events.RankJoined(replace(RANK, rank=run.RankId(slot, f"s.{slot}"), is_ready=True), 5 + slot), 0.0
            )
        assert machine.generations.current.is_standing
        assert why(machine, STRANGER) is None
        return machine

    @pytest.mark.parametrize("membership", [Membership.OPEN, Membership.OUTSIDER])
    @pytest.mark.parametrize("restarts", [False, True])
    def test_a_stop_of_one_that_has_no_part_ends_it_alone(self, membership: Membership, restarts: bool):
        machine = self.running()
        if restarts:  # of the lighthouse
            machine = again(machine)
            assert why(machine, STRANGER, now=6.0) is None
        said = [
            e
            for e in asked(machine, 9, STOP, membership)
            if isinstance(e, events.SupervisorMessage | events.OutsiderIgnored)
        ]
        stop = run.RunStopped("a stranger says so", "z", machine.generations.current.number)
        assert said == [events.OutsiderIgnored("z", "its stop affects only itself"), events.SupervisorMessage(9, stop)]
        assert (machine.stop, machine.generations.current.is_standing) == (None, True)
        assert isinstance(told(machine.handle(events.SupervisorJoined(STRANGER, 10), 3.0), 10), run.RunStopped), (
            "it comes again"
        )
        assert why(machine, replace(STRANGER, incarnation="z2"), session=11, now=3.0) is None

    def test_its_ranks_or_its_groups_place_in_the_quorum_give_it_a_say(self):
        machine = self.running()
        assert isinstance(asked(machine, 1, STOP, Membership.OUTSIDER)[1], events.Stopped)
        machine = self.running()
        assert isinstance(asked(machine, 9, STOP, Membership.MEMBER)[1], events.Stopped)

    def test_a_part_is_kept_over_restarts_and_while_its_ranks_are_started_again(self):
        machine = self.running()
        machine.handle(events.RankLost(run.RankId(0, "s.0"), "exit code 130", by="g"), 1.0)
        machine = again(machine)
        assert why(machine, SUPERVISOR, session=12, now=5.0) is None
        assert isinstance(asked(machine, 12, STOP, Membership.OUTSIDER)[1], events.Stopped)

    def test_another_one_under_the_same_name_does_not_inherit_it(self):
        machine = self.running()
        for session in (1, 5, 6):
            machine.handle(events.SupervisorEnded(session) if session == 1 else events.SessionEnded(session), 1.0)
        assert why(machine, replace(SUPERVISOR, incarnation="2", secret=THEIRS), session=13) is None
        asked(machine, 13, STOP, Membership.OUTSIDER)
        assert machine.stop is None

    def test_where_nothing_stands_yet_any_may_stop_it(self):
        machine = supervised()
        assert why(machine, STRANGER) is None
        asked(machine, 9, STOP, Membership.OUTSIDER)
        assert machine.stop is None
        machine = supervised()
        asked(machine, 1, STOP, Membership.OPEN)
        assert machine.stop == run.RunStopped("a stranger says so", "g", -1)

    def test_a_host_that_it_excludes_is_kept_from_itself_alone(self):
        machine = self.running()
        assert events.OutsiderIgnored("z", "host h1 is excluded for this supervisor only") in asked(
            machine, 9, EXCLUDE, Membership.OPEN
        )
        assert machine.generations.current.is_standing
        for each in (machine, again(machine)):
            assert why(each, replace(STRANGER, incarnation="z2"), now=6.0) is WrongState
            assert why(each, SUPERVISOR, session=14, now=6.0) is None
            refused = each.handle(
                events.RankJoined(run.RankHello(run.RankId(1, "x"), run.RunTerms(2), host="h1"), 15), 60.0
            )
            assert not [e for e in refused if isinstance(e, events.RankRefused) and isinstance(e.error, WrongState)]

    def test_what_one_says_that_was_not_taken_in_is_nobodys_word(self):
        machine = self.running()
        for message in (STOP, EXCLUDE):
            assert asked(machine, 77, message, Membership.MEMBER) == []


class TestDriver:
    """What a stranger says on its stream, after it was refused, is nobody's word."""

    def test_a_stranger_ends_no_stream_of_a_rank_and_sets_no_key(self):
        loop = VirtualLoop()
        driver = RunDriver(("j", "r"), RunMachine(), MemoryStore(), Ports(loop, loop.time), NoJobs())
        rank, stranger = Listener(), Listener()
        driver.open_rank(RANK, rank)
        number = driver.open_rank(replace(RANK, attempt=1, secret=THEIRS), stranger)
        [answer] = stranger.messages
        assert isinstance(refusal(answer), DuplicateReplica)
        driver.receive_from_rank(number, RANK)
        driver.end_rank(number)
        assert rank.messages == [run.RankWelcome(0)]
        assert driver.machine.generations.ranks.find_live(RANK.rank) is not None
        for slot, secret in ((0, THEIRS), (0, ""), (1, OURS), (7, OURS)):
            with pytest.raises(NotPermitted, match="only ranks of run r"):
                driver.put_key(0, run.KeyKind.ITERATION, "a", b"", slot=slot, secret=secret)

    def test_nor_does_one_that_says_it_supervises_them(self):
        driver = RunDriver(("j", "r"), RunMachine(), MemoryStore(), Ports(VirtualLoop(), float), NoJobs())
        ours, stranger = Listener(), Listener()
        driver.open_supervisor(SUPERVISOR, ours)
        driver.open_rank(RANK, Listener())
        number = driver.open_supervisor(replace(SUPERVISOR, secret=THEIRS), stranger)
        driver.receive_from_supervisor(number, run.ProcessLost(RANK.rank, "SIGKILL"))
        assert driver.machine.generations.ranks.find_live(RANK.rank) is not None
        assert ours.messages == [run.SupervisorWelcome(1.0)]


def test_a_stage_whose_ranks_show_nothing_runs():
    """Tests of other rules leave the secrets out."""
    assert running(2).machine.generations.current.is_standing
