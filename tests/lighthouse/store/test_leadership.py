"""When a lighthouse may lead."""

from dataclasses import replace

import pytest

from lighthouse.store import election, leadership
from lighthouse.store.leadership import Candidate, CandidateConfig, Leader, Role, dump, parse
from tests.lighthouse.store.race import Race, Racer

OTHER = Leader("other", "b:1", "b:2", 7)


def campaigning(granted_at: float = 0.0) -> Candidate:
    """A candidate that has asked for lease 99 at 0 s, and claims the key under it."""
    candidate = Candidate(CandidateConfig("me"), 0.0)
    assert candidate.tick(0.0) == (leadership.ReadLeader(1),)
    assert candidate.handle(leadership.LeaderRead(1, None), 0.0) == (leadership.GrantLease(2, 3.0),)
    assert candidate.handle(leadership.LeaseGranted(2, 99, 3.0), granted_at) == (leadership.Claim(3, 99),)
    return candidate


def leading() -> Candidate:
    candidate = campaigning()
    assert candidate.handle(leadership.ClaimWon(3, 41, 5), 0.0) == (leadership.LoadRecords(4),)
    assert not candidate.may_act(0.0)
    assert candidate.handle(leadership.RecordsLoaded(4), 0.0) == (leadership.LeadershipBegan(5, 41),)
    assert candidate.may_act(0.0)
    return candidate


def test_it_leads_once_all_records_are_loaded_and_renews_its_lease() -> None:
    candidate = leading()
    assert candidate.deadline() == 0.5
    assert candidate.tick(0.5) == (leadership.RenewLease(5, 99),)
    assert candidate.handle(leadership.LeaseRenewed(5, 3.0), 0.6) == ()
    assert candidate.may_act(2.49)
    assert not candidate.may_act(2.51), "counted from when the renewal was sent, not from its answer"


def test_without_a_renewal_it_stops_at_two_thirds_of_the_lease_whoever_asks_first() -> None:
    candidate = leading()
    assert candidate.may_act(1.99)
    assert not candidate.may_act(2.0)
    assert "no lighthouse leads" in str(candidate.refusal(2.0))
    assert candidate.tick(2.0) == (
        leadership.LeadershipEnded("its lease was not renewed for 67% of its time"),
        leadership.RevokeLease(99),
    )


def test_the_first_lease_counts_from_its_request_too() -> None:
    candidate = campaigning(granted_at=1.0)
    candidate.handle(leadership.ClaimWon(3, 41, 5), 1.1)
    assert candidate.handle(leadership.RecordsLoaded(4), 1.2) == (leadership.LeadershipBegan(5, 41),)
    assert candidate.may_act(1.99)
    assert not candidate.may_act(2.0), "the store counts its time from a moment before the answer came"


def test_a_renewal_that_is_answered_late_takes_nothing_back() -> None:
    candidate = leading()
    candidate.tick(0.5)
    candidate.tick(1.0)
    candidate.handle(leadership.LeaseRenewed(6, 3.0), 1.1)
    candidate.handle(leadership.LeaseRenewed(5, 3.0), 1.2)
    assert candidate.may_act(2.99)
    assert not candidate.may_act(3.0)


def test_the_end_of_an_earlier_lease_is_not_that_of_the_present_one() -> None:
    candidate = leading()
    candidate.tick(0.5)
    candidate.handle(leadership.WriteRefused("another leads"), 0.6)
    candidate.tick(0.85)
    candidate.handle(leadership.LeaderRead(6, None), 0.9)
    candidate.handle(leadership.LeaseGranted(7, 100, 3.0), 0.9)
    candidate.handle(leadership.ClaimWon(8, 43, 6), 0.9)
    candidate.handle(leadership.RecordsLoaded(9), 0.9)
    assert candidate.handle(leadership.LeaseEnded(5), 1.0) == ()
    candidate.handle(leadership.LeaseRenewed(5, 3.0), 1.1)
    assert candidate.may_act(2.8)
    assert not candidate.may_act(2.91), "nor does a renewal of it count"


def test_after_a_pause_the_first_event_finds_it_fenced_whatever_it_says() -> None:
    candidate = leading()
    candidate.tick(0.5)
    effects = candidate.handle(leadership.LeaseRenewed(5, 3.0), 60.0)
    assert isinstance(effects[0], leadership.LeadershipEnded)
    assert not candidate.may_act(60.0)


def test_a_lease_that_the_store_has_ended_ends_it_at_once() -> None:
    candidate = leading()
    candidate.tick(0.5)
    assert isinstance(candidate.handle(leadership.LeaseEnded(5), 0.6)[0], leadership.LeadershipEnded)
    assert not candidate.may_act(0.6)


def test_a_write_that_is_refused_ends_it_at_once() -> None:
    candidate = leading()
    effects = candidate.handle(leadership.WriteRefused("another leads"), 0.1)
    assert effects == (leadership.LeadershipEnded("another leads"), leadership.RevokeLease(99))


def test_a_claim_without_an_answer_is_given_up_with_its_lease() -> None:
    candidate = campaigning()
    assert candidate.handle(leadership.RequestFailed(3, "no answer"), 1.0) == (leadership.RevokeLease(99),)
    assert candidate.handle(leadership.ClaimWon(3, 41, 5), 1.1) == (), "the late answer is of a claim that is given up"
    assert candidate.status(1.1).role is Role.FOLLOWING


def test_a_campaign_ends_where_a_request_is_never_answered() -> None:
    candidate = campaigning()
    candidate.handle(leadership.ClaimWon(3, 41, 5), 0.2)
    for number in range(6):  # all renewals are answered
        now = candidate.deadline()
        assert now is not None
        assert candidate.tick(now) == (leadership.RenewLease(5 + number, 99),)
        candidate.handle(leadership.LeaseRenewed(5 + number, 3.0), now)
    assert candidate.tick(3.5) == (leadership.RevokeLease(99),)
    assert "no answer from the store within 3 s" in str(candidate.refusal(3.5))
    assert candidate.deadline() == 6.5, "the records could not be read, so another lighthouse is to try first"
    assert candidate.handle(leadership.RecordsLoaded(4), 3.6) == (), "the late answer is of a campaign that is given up"


def test_a_follower_names_the_leader_and_the_store_that_does_not_answer() -> None:
    candidate = Candidate(CandidateConfig("me"), 0.0)
    candidate.tick(0.0)
    assert candidate.handle(leadership.LeaderRead(1, OTHER), 0.0) == (leadership.LeaderChanged(OTHER),)
    refusal = candidate.refusal(0.1)
    assert refusal is not None
    assert (refusal.leader, str(refusal)) == ("b:1", "this lighthouse is a follower; the leader is b:1")
    candidate.tick(0.25)
    assert candidate.handle(leadership.RequestFailed(2, "etcd at x: no answer"), 1.0) == ()
    candidate.tick(3.5)
    assert candidate.handle(leadership.RequestFailed(3, "etcd at x: no answer"), 4.0) == (
        leadership.LeaderChanged(None),
    )
    refusal = candidate.refusal(4.0)
    assert str(refusal).startswith("store_unavailable: etcd at x: no answer, for 4 s;")


def test_why_a_candidacy_failed_is_shown_until_a_lighthouse_leads() -> None:
    candidate, full = Candidate(CandidateConfig("me"), 0.0), "etcd at x: no space"
    candidate.tick(0.0)
    candidate.handle(leadership.LeaderRead(1, None), 0.0)
    candidate.handle(leadership.RequestFailed(2, full), 0.1)
    candidate.tick(0.25)
    for number, answer in enumerate(
        (
            leadership.LeaderRead(3, None),  # a store without space is still read
            leadership.LeaseGranted(4, 99, 3.0),
            leadership.LeaseRenewed(9, 3.0),
            leadership.ClaimWon(5, 41, 5),
        )
    ):
        now = 0.3 + 0.1 * number
        candidate.handle(answer, now)
        assert candidate.status(now).store_error == full
        assert str(candidate.refusal(now)).startswith(f"store_unavailable: {full}, for ")
    candidate.handle(leadership.RecordsLoaded(6), 0.7)
    assert candidate.status(0.7).store_error == ""
    candidate.tick(1.0)
    candidate.handle(leadership.RequestFailed(7, full), 1.1)
    assert candidate.status(1.1).store_error == full
    candidate.handle(leadership.LeaseRenewed(7, 3.0), 1.2)
    assert candidate.status(1.2).store_error == "", "a leader needs no more than its lease"


@pytest.mark.parametrize("of", [leadership.LeaderRead(3, OTHER), leadership.ClaimLost(5, OTHER)])
def test_a_candidacy_that_failed_is_past_once_another_leads(of: leadership.LeaderRead | leadership.ClaimLost) -> None:
    candidate = Candidate(CandidateConfig("me"), 0.0)
    candidate.tick(0.0)
    candidate.handle(leadership.LeaderRead(1, None), 0.0)
    candidate.handle(leadership.RequestFailed(2, "etcd at x: no answer"), 0.1)
    candidate.tick(0.25)
    if isinstance(of, leadership.ClaimLost):
        candidate.handle(leadership.LeaderRead(3, None), 0.3)
        candidate.handle(leadership.LeaseGranted(4, 99, 3.0), 0.3)
    candidate.handle(of, 0.4)
    assert candidate.status(0.4).store_error == ""


def test_its_own_key_of_an_ended_leadership_is_no_leader_to_follow() -> None:
    candidate = Candidate(CandidateConfig("me"), 0.0)
    candidate.tick(0.0)
    assert candidate.handle(leadership.LeaderRead(1, replace(OTHER, candidate="me")), 0.0) == ()
    assert candidate.deadline() == 0.25


def test_it_gives_its_lease_back_until_the_store_has_heard_so() -> None:
    candidate = leading()
    assert leadership.RevokeLease(99) in candidate.tick(2.0)
    [read] = candidate.tick(2.25)
    assert isinstance(read, leadership.ReadLeader)
    mine = replace(OTHER, candidate="me")
    assert candidate.handle(leadership.LeaderRead(read.number, mine), 2.3) == (leadership.RevokeLease(99),)
    [read] = candidate.tick(2.6)
    assert isinstance(read, leadership.ReadLeader)
    assert isinstance(candidate.handle(leadership.LeaderRead(read.number, None), 2.7)[0], leadership.GrantLease)


def test_one_that_resigns_gives_its_lease_back_and_does_nothing_more() -> None:
    candidate = leading()
    assert candidate.handle(leadership.Resigned(), 0.1)[-1] == leadership.RevokeLease(99)
    assert candidate.deadline() is None
    assert candidate.tick(9.0) == ()
    assert candidate.handle(leadership.RecordsLoaded(4), 9.0) == ()


def test_what_the_key_says_is_read_back() -> None:
    assert parse(dump(OTHER)) == OTHER
    for raw in (b"", b"{}", b"[]", b"7"):
        with pytest.raises(ValueError):
            parse(raw)


# -- never two


@pytest.mark.parametrize("seed", range(60))
def test_one_that_may_act_is_the_one_that_the_store_names(seed: int) -> None:
    race = Race(seed)
    race.run()
    assert race.terms == sorted(set(race.terms)), "each leadership has a term of its own, and they grow"


def test_whatever_happens_one_comes_to_lead() -> None:
    races = [race for race in map(Race, range(30)) if race.racers[0].loss < 0.3]
    assert len(races) > 10
    for race in races:
        race.run()
        assert race.terms


def test_without_faults_a_stopped_leader_is_followed_within_its_lease_and_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Racer, "delay_s", lambda racer: 0.005)
    race = Race(1, has_faults=False)
    race.run(30.0)
    [leader] = race.acting
    next(racer for racer in race.racers if racer.name == leader).pause(100.0)
    race.run(30.0 + 3.0 / 0.9 + 0.4)
    [successor] = race.acting
    assert successor != leader


class LateFence(Candidate):
    """A planted defect: the fence is beyond the lease."""

    def may_act(self, now: float) -> bool:
        return super().may_act(now - 1.8)


class FromTheAnswer(Candidate):
    """A planted defect: a renewal counts from its answer."""

    def handle(self, event: leadership.Event, now: float):  # type: ignore[no-untyped-def]
        if isinstance(event, leadership.LeaseRenewed):
            self._renewals[event.number] = now
        return super().handle(event, now)


class KeepsItsClaim(Candidate):
    """A planted defect: a timer ends the leadership, and the clock is not asked at each act."""

    def may_act(self, now: float) -> bool:
        return self._role is Role.LEADING


@pytest.mark.parametrize("defect", [LateFence, FromTheAnswer, KeepsItsClaim])
def test_the_race_finds_a_planted_defect(defect: type[Candidate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "Candidate", defect)

    def is_found(seed: int) -> bool:
        try:
            Race(seed).run()
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(60)))


def test_the_fence_leaves_room_for_clocks_that_run_at_different_rates() -> None:
    slowest, fastest = 0.9, 1.1
    assert leadership.FENCE_SHARE / slowest < 1 / fastest
