"""Which ranks are there."""

from lighthouse_protocol.messages.membership import Participant
from manager.group.presence import RankPresence
from manager.group.records import LostRank, ReplicaGroup


def records(size: int) -> ReplicaGroup:
    return ReplicaGroup(Participant("a", group_world_size=size))


def lost(watches: RankPresence) -> list[int]:
    return [loss.group_rank for loss in watches.losses]


def missing(watches: RankPresence) -> frozenset[int]:
    return watches.absence()[1]


def is_starting(watches: RankPresence) -> bool:
    return any(rank.watch is None and not rank.has_asked and rank.loss is None for rank in watches._group.ranks)


def is_restarting(watches: RankPresence) -> bool:
    return bool(watches.losses) and all(loss.is_restarted for loss in watches.losses)


def watched(size: int = 2) -> RankPresence:
    watches = RankPresence(records(size))
    for rank in range(size):
        assert is_starting(watches)
        assert not watches.is_complete
        assert not watches.open_watch(rank + 1, rank, f"w{rank}")
    assert (watches.is_complete, is_starting(watches), lost(watches)) == (True, False, [])
    assert watches.staying_watches() == tuple(range(1, size + 1))
    return watches


def test_one_rank_twice_is_one_rank():
    watches = RankPresence(records(2))
    watches.open_watch(1, 0, "w0")
    assert not watches.open_watch(2, 0, "w0")
    assert (watches.is_complete, is_starting(watches)) == (False, True)


def test_the_end_of_its_watch_is_the_loss_of_the_rank():
    watches = watched(3)
    assert [watches.end_watch(watch, 0.0) for watch in (3, 1, 3, 99)] == [2, 0, None, None]
    assert (lost(watches), watches.is_complete, watches.staying_watches()) == ([0, 2], False, (2,))
    assert not is_starting(watches), "it has been there"


def test_all_that_are_lost_are_started_again_until_they_are_back_or_lost_anew():
    watches = watched()
    watches.record_restart()
    assert not is_restarting(watches), "none was lost"
    watches.end_watch(1, 0.0)
    assert not is_restarting(watches)
    watches.record_restart()
    assert is_restarting(watches)
    watches.end_watch(2, 1.0)
    assert not is_restarting(watches), "rank 1 is not started yet"
    watches.record_restart()
    watches.open_watch(3, 0, "w0'")
    assert is_restarting(watches)
    watches.end_watch(3, 2.0)
    assert not is_restarting(watches), "it has ended again"
    watches.record_restart()
    watches.open_watch(4, 0, "w0''")
    watches.open_watch(5, 1, "w1'")
    assert (is_restarting(watches), lost(watches)) == (False, [])


def test_the_end_of_an_old_watch_never_touches_the_newer_one():
    watches = watched()
    assert not watches.open_watch(3, 1, "w1")
    assert watches.staying_watches() == (1, 2, 3), "both are told what is pushed"
    assert watches.end_watch(2, 0.0) is None
    assert (lost(watches), watches.is_complete) == ([], True)
    assert watches.end_watch(3, 0.0) == 1


def test_another_process_of_a_watched_rank_is_the_loss_of_the_old_one():
    watches = watched()
    assert watches.open_watch(3, 1, "w1-again")
    assert watches.end_watch(2, 0.0) is None
    assert lost(watches) == []
    assert watches.end_watch(3, 0.0) == 1
    assert not watches.open_watch(4, 1, "w1-again-again"), "the old one was lost before"


def test_one_that_leaves_stays_for_its_mates_until_each_has_moved_on():
    watches = watched(4)
    assert watches.begin_leaving(1, watches.staying_ranks)
    watches.open_watch(5, 1, "w1")
    watches.record_request(2)
    watches.end_watch(4, 0.0)
    assert watches.release() == (), "rank 1 has only opened another watch"
    assert watches.open_watch(6, 1, "w1-again")
    assert (watches.release(), watches.release()) == ((1,), ())


def test_an_old_process_of_a_rank_stays_for_nobody():
    watches = watched(2)
    watches.open_watch(3, 0, "w0-again")
    assert not watches.begin_leaving(1, watches.staying_ranks)
    assert watches.release() == (1,)


def test_a_rank_without_a_watch_is_there_when_it_asks_and_is_not_complete():
    watches = RankPresence(records(2))
    watches.record_request(0)
    assert is_starting(watches)
    watches.record_request(1)
    assert (is_starting(watches), watches.is_complete, watches.staying_watches()) == (False, False, ())


def test_coming_and_going_leaves_nothing_behind():
    group = records(2)
    watches = RankPresence(group)
    for n in range(100):
        watches.open_watch(n, n % 2, f"w{n}")
        if n > 1:
            watches.end_watch(n - 2, 0.0)
    assert len(group.watches) == 2


def test_a_rank_that_says_why_it_ends_is_lost_once_and_an_older_process_says_nothing():
    watches = watched()
    assert not watches.record_rank_failure(1, "w1-before", "x", 0.0)
    assert not watches.record_rank_failure(7, "w1", "x", 0.0)
    assert watches.record_rank_failure(1, "w1", "ValueError: x", 0.0)
    assert watches.end_watch(2, 0.0) is None
    assert (lost(watches), watches.is_complete) == ([1], False)
    assert watches.loss_of(1).reason == "rank 1 has failed: ValueError: x"


class TestRankTimeout:
    def test_a_silent_rank_without_a_watch_is_lost_until_it_asks_again(self):
        watches = RankPresence(records(2), rank_timeout_s=10)
        watches.record_request(0)
        watches.restart_timeout([0], 5)
        assert watches.deadline() == 15
        assert [watches.expire_ranks(now) for now in (14.9, 15, 99)] == [[], [0], []]
        assert watches.loss_of(0).reason == "rank 0 has sent no request for 10 s"
        assert watches.deadline() == 25, "it is given up then"
        watches.record_request(0)
        watches.restart_timeout([0], 20)
        assert (lost(watches), watches.deadline()) == ([], 30)

    def test_with_a_watch_or_without_a_timeout_silence_is_nothing(self):
        seen, endless = (
            RankPresence(records(1), rank_timeout_s=10),
            RankPresence(records(1)),
        )
        seen.open_watch(1, 0, "w")
        for watches in (seen, endless):
            watches.record_request(0)
            watches.restart_timeout([0], 5)
            assert (watches.deadline(), watches.expire_ranks(99)) == (None, [])


def test_a_manager_that_was_paused_gives_its_ranks_that_time():
    watches = RankPresence(records(2), rank_timeout_s=10)
    watches.open_watch(1, 1, "w1")
    watches.end_watch(1, 4.0)
    watches.record_request(0)
    watches.restart_timeout([0], 5.0)
    watches.postpone_timeouts(3600.0)
    assert watches.deadline() == 3614.0
    assert (watches.give_up_ranks(3613.9), watches.expire_ranks(3614.9)) == ([], [])
    assert [absence.group_rank for absence in watches.give_up_ranks(3614.0)] == [1]
    assert watches.expire_ranks(3615.0) == [0]


class TestWhoIsNotBack:
    def test_is_given_up_once_with_its_mates_of_then(self):
        watches = watched(3)
        assert watches.end_watch(2, 100.0) == 1
        watches.open_watch(4, 2, "w2-again")
        assert (watches.deadline(), watches.give_up_ranks(109.9)) == (110.0, [])
        [absence] = watches.give_up_ranks(110.0)
        assert absence == LostRank(1, 100.0, frozenset({"w0", "w2"}), has_left=False)
        assert watches.watches_of(absence.mates) == (1, 3), "the process that is new waits for nobody of before"
        assert (watches.deadline(), watches.give_up_ranks(999.0), lost(watches)) == (None, [], [1])

    def test_a_mate_whose_watch_is_between_two_counts(self):
        watches = watched(3)
        watches.end_watch(1, 100.0)
        watches.end_watch(2, 100.0)
        watches.open_watch(4, 0, "w0")
        [absence] = watches.give_up_ranks(110.0)
        assert absence.group_rank == 1
        assert watches.watches_of(absence.mates) == (3, 4)

    def test_who_has_a_watch_or_asks_is_back(self):
        watches = watched()
        watches.end_watch(1, 0.0)
        watches.end_watch(2, 0.0)
        watches.open_watch(3, 0, "w0")
        watches.record_request(1)
        assert (lost(watches), watches.deadline(), watches.give_up_ranks(99.0)) == ([], None, [])
        assert not watches.is_complete, "rank 1 has no watch"

    def test_each_has_its_own_time_and_who_has_left_is_told_apart(self):
        watches = watched(3)
        watches.begin_leaving(1)
        watches.begin_leaving(77)
        watches.end_watch(1, 0.0)
        watches.end_watch(2, 4.0)
        assert [(absence.group_rank, absence.has_left) for absence in watches.give_up_ranks(10.0)] == [(0, True)]
        assert watches.deadline() == 14.0
        assert [absence.has_left for absence in watches.give_up_ranks(14.0)] == [False]


def test_the_missing_ones_are_those_that_have_not_come_or_have_gone():
    watches = RankPresence(records(4))
    watches.open_watch(1, 0, "w0")
    watches.record_request(2)
    assert missing(watches) == {1, 3}
    watches.end_watch(1, 0.0)
    assert missing(watches) == {0, 1, 3}
    watches.record_request(0)
    assert missing(watches) == {1, 3}
