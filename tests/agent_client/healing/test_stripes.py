"""The rules of a transfer from several sources: what is asked of whom, and what is done about a source that is slow,
dies, or holds something else."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.healing.rules.stripes import (
    FIRST_BYTES,
    FIRST_PAUSE_S,
    TRIES,
    ChecksumArrived,
    ConnectionLost,
    Disconnect,
    LeadChosen,
    LeadLost,
    PieceArrived,
    PieceRequest,
    Refused,
    SourceRejected,
    StripePlan,
)
from tests.agent_client.healing.simulated_stripes import MIB, SILENCE_S, Source, Transfer

PIECE = 4 * MIB
RATE = 100 * MIB
STATE = [b"%d" % number for number in range(256)]
SIZES = [PIECE] * len(STATE)


def source(name: str, rate: float = RATE, holds: Sequence[bytes] = STATE, **faults: float) -> Source:
    return Source(name, rate, holds, faults)


def plan(pieces: int, sources: Sequence[str] = "ab", **options: bool) -> StripePlan:
    return StripePlan([PIECE] * pieces, list(sources), deadline=100, silence_s=10, **options)


def begun(pieces: int, sources: Sequence[str] = "ab", announced: int = 0) -> StripePlan:
    """A plan whose lead is a, which has told the checksums of its first pieces."""
    it = plan(pieces, sources)
    it.handle(LeadChosen("a"), 0)
    for checksum in STATE[:announced]:
        it.handle(ChecksumArrived(checksum), 0)
    return it


class TestShares:
    def test_each_is_asked_for_a_first_part_at_once(self) -> None:
        effects = plan(5).handle(LeadChosen("a"), 1)
        assert effects == [PieceRequest("a", (0, 1), 10), PieceRequest("b", (2, 3), 10)]
        assert 2 * PIECE == FIRST_BYTES

    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_equal_sources_divide_the_time_by_their_number(self, count: int) -> None:
        alone = Transfer(SIZES, [source("a")]).seconds()
        together = Transfer(SIZES, [source(name) for name in "abcde"[:count]]).seconds()
        assert alone / together > 0.95 * count

    def test_a_fast_one_gives_more(self) -> None:
        transfer = Transfer(SIZES, [source("a", 4 * RATE), source("b", RATE)])
        assert transfer.seconds() < 1.1 * sum(SIZES) / (5 * RATE)
        assert transfer.plan.shares["a"] > 3 * transfer.plan.shares["b"]

    def test_one_that_is_far_slower_costs_nothing(self) -> None:
        alone = Transfer(SIZES, [source("a")]).seconds()
        assert Transfer(SIZES, [source("a"), source("b", RATE / 1000)]).seconds() < 1.05 * alone

    def test_and_is_not_asked_for_the_last_pieces(self) -> None:
        it = begun(7)
        it.handle(PieceArrived("a", b"0"), 0.04)
        assert it.handle(PieceArrived("a", b"1"), 0.08) == [PieceRequest("a", (4,), 10)]
        it.handle(PieceArrived("b", b"2"), 4)
        assert it.handle(PieceArrived("b", b"3"), 8) == []
        assert it.handle(PieceArrived("a", b"4"), 8.1) == [PieceRequest("a", (5,), 10)]

    def test_the_last_one_may_be_silent_until_the_deadline(self) -> None:
        it = begun(3)
        it.handle(Refused("b", "409"), 1)
        it.handle(PieceArrived("a", b"0"), 2)
        assert it.handle(PieceArrived("a", b"1"), 2) == [PieceRequest("a", (2,), 98)]


class TestLeadsAlone:
    def test_others_are_asked_for_nothing_but_for_what_it_does_not_give(self) -> None:
        it = plan(3, "ba", leads_alone=True)
        assert it.handle(LeadChosen("a"), 0) == [PieceRequest("a", (0, 1, 2), 10)]
        assert it.handle(PieceArrived("a", b"0"), 1) == []
        assert it.handle(ConnectionLost("a", "it is dead"), 2) == [PieceRequest("b", (1, 2), 10)]


class TestFaults:
    @pytest.mark.parametrize("lost", ["a", "b", "c"])
    def test_one_of_three_that_dies_half_way_costs_what_it_would_have_given(self, lost: str) -> None:
        whole = Transfer(SIZES, [source(name) for name in "abc"]).seconds()
        sources = [source(name, dies=whole / 2 if name == lost else 1e9) for name in "abc"]
        transfer = Transfer(SIZES, sources)
        assert whole < transfer.seconds() < 1.3 * whole
        assert transfer.places == STATE

    def test_one_that_falls_silent_is_not_waited_for(self) -> None:
        transfer = Transfer(SIZES, [source("a"), source("b"), source("c", silences=0.5)])
        assert transfer.seconds() < SILENCE_S / 4
        assert any(effect == Disconnect("c") for _, effect in transfer.log)

    def test_nor_one_that_gets_slow(self) -> None:
        transfer = Transfer(SIZES, [source("a"), source("b"), source("c", slows=0.5)])
        assert transfer.seconds() < 1.3 * sum(SIZES) / (2 * RATE)

    def test_a_broken_connection_is_opened_again_after_a_pause(self) -> None:
        it = begun(9)
        assert it.handle(ConnectionLost("b", "reset"), 1) == []
        assert it.deadline(1) == 1 + FIRST_PAUSE_S
        assert it.tick(1 + FIRST_PAUSE_S) == [PieceRequest("b", (2, 3), 10)]

    def test_one_that_never_gets_on_is_passed_over(self) -> None:
        it = begun(9)
        effects = [effect for number in range(TRIES) for effect in it.handle(ConnectionLost("b", "reset"), number + 1)]
        assert effects[-1] == SourceRejected("b", f"reset ({TRIES} times in a row)")
        assert it.rejected.keys() == {"b"}

    def test_a_piece_that_arrives_ends_the_row_of_breaks(self) -> None:
        it = plan(9, "a")
        effects = it.handle(LeadChosen("a"), 0)
        for number in range(1, 3 * TRIES):
            event = PieceArrived("a", b"0") if number % TRIES == 0 else ConnectionLost("a", "reset")
            effects += [*it.handle(event, number), *it.tick(number + 0.9)]
        assert not it.rejected
        assert [type(effect) for effect in effects] == [PieceRequest] * len(effects)

    def test_one_that_was_cut_off_for_its_slowness_is_not_asked_for_the_last_pieces_again(self) -> None:
        it = begun(20)
        for number, piece in enumerate([0, 1, *range(4, 8), *range(11, 20)], start=1):
            it.handle(PieceArrived("a", STATE[piece]), 0.04 * number)
            if number < 3:
                it.handle(PieceArrived("b", STATE[number + 1]), 0.04 * number)
        assert it.next_piece("b") == 8
        assert it.tick(0.67) == [Disconnect("b"), PieceRequest("a", (8,), 10)]
        assert it.handle(ConnectionLost("b", "cut off"), 0.67) == []
        assert it.tick(0.67 + FIRST_PAUSE_S) == [], "9 is left, and comes sooner from a after 8"
        assert it.handle(PieceArrived("a", b"8"), 0.73) == [PieceRequest("a", (9,), 10)]

    def test_it_is_over_when_none_is_left(self) -> None:
        it = begun(1)
        it.handle(Refused("a", "409"), 1)
        assert not it.is_over
        it.handle(Refused("b", "409"), 1)
        assert it.is_over
        assert not it.is_done


class TestOneState:
    def test_a_piece_that_differs_is_asked_of_the_lead(self) -> None:
        it = begun(4, announced=4)
        it.handle(PieceArrived("a", b"0"), 1)
        it.handle(PieceArrived("a", b"1"), 1)
        assert it.handle(PieceArrived("b", b"another"), 1) == [PieceRequest("a", (2,), 10)]
        assert it.received == 2 * PIECE
        it.handle(PieceArrived("b", b"3"), 2)
        assert not it.is_done
        it.handle(PieceArrived("a", b"2"), 2)
        assert it.is_done

    def test_a_piece_that_only_the_lead_before_had_is_asked_of_any_source(self) -> None:
        it = begun(3, "abc", announced=3)
        it.handle(PieceArrived("b", b"another"), 0.5)
        it.handle(PieceArrived("c", b"2"), 0.6)
        assert it.handle(Refused("a", "409"), 1) == [SourceRejected("a", "409"), PieceRequest("b", (0,), 10)]
        assert it.needs_lead
        assert it.handle(LeadChosen("b"), 1) == [PieceRequest("c", (1,), 10)]

    def test_buffers_of_its_own_are_no_reason_to_do_without_a_source(self) -> None:
        sizes = [PIECE if number % 2 else 100 for number in range(256)]
        own = [it if size == PIECE else b"own" for it, size in zip(STATE, sizes, strict=True)]
        transfer = Transfer(sizes, [source("a"), source("b", holds=own)])
        alone = Transfer(sizes, [source("a")]).seconds()
        assert transfer.seconds() < 0.6 * alone
        assert transfer.places == STATE
        assert not transfer.plan.rejected

    def test_one_that_holds_another_state_is_passed_over_and_it_is_said(self) -> None:
        transfer = Transfer(SIZES, [source("a"), source("b", holds=[b"x"] * 256), source("c")])
        transfer.seconds()
        assert transfer.plan.rejected == {"b": "holds another state than a"}
        assert transfer.places == STATE

    def test_a_lead_that_sends_something_else_than_it_announces_is_passed_over(self) -> None:
        it = begun(2, announced=1)
        effects = it.handle(PieceArrived("a", b"x"), 1)
        assert effects[0] == SourceRejected("a", "sends something else than it announces")
        assert it.needs_lead

    def test_another_lead_keeps_what_is_the_same(self) -> None:
        it = begun(4)
        for event in (PieceArrived("a", b"0"), PieceArrived("a", b"old"), PieceArrived("b", b"2"), LeadLost()):
            it.handle(event, 1)
        assert it.needs_lead
        it.handle(LeadChosen("b"), 1)
        found = [it.handle(ChecksumArrived(checksum), 2) for checksum in (b"0", b"new", b"2", b"3")]
        assert found == [[], [], [], []]
        assert it.handle(PieceArrived("b", b"3"), 3) == [PieceRequest("b", (1,), 10)]
        it.handle(PieceArrived("b", b"new"), 4)
        assert it.is_done

    def test_one_whose_checksums_are_all_here_is_not_missed(self) -> None:
        it = begun(3, announced=3)
        it.handle(LeadLost(), 1)
        it.handle(Refused("a", "gone"), 1)
        assert not it.needs_lead


no_faults: dict[str, float] = {}
faults = st.sampled_from([no_faults, no_faults, {"dies": 0.5}, {"silences": 0.5}, {"slows": 0.3}, {"dies": 0.0}])
sizes_drawn = st.lists(st.sampled_from([8, 100, MIB, PIECE, PIECE]), min_size=1, max_size=60)
drawn = st.lists(
    st.tuples(st.sampled_from([1.0, 1.0, 0.5, 0.01]), faults, st.integers(0, 100), st.floats(0.1, 20)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(sizes_drawn, drawn)
def test_whatever_happens_what_is_here_in_the_end_is_what_its_lead_holds(
    sizes: list[int], those: list[tuple[float, dict[str, float], int, float]]
) -> None:
    """And it is here, if a source is left that does not fail."""
    sources: list[Source] = []
    for number, (speed, fault, own, scale) in enumerate(those):
        holds = [b"%d" % at if (at * 37) % 101 >= own or not number % 2 else b"own" for at in range(len(sizes))]
        moments = {what: at * scale for what, at in fault.items()}
        sources.append(Source(f"s{number}", speed * RATE, holds, moments))
    transfer = Transfer(sizes, sources)
    if transfer.run():
        assert transfer.lead is not None
        assert transfer.places == list(transfer.lead.holds)
        assert transfer.plan.received == sum(sizes)
        healthy = [it for it in sources if not it.fails and it.name not in transfer.plan.rejected]
        if any(own for _, _, own, _ in those):
            return  # what only a slow lead has takes its time
        assert not healthy or transfer.now < len(sources) * SILENCE_S + 3 * sum(sizes) / max(it.rate for it in healthy)
    else:
        assert all(it.fails or it.name in transfer.plan.rejected for it in sources)


def test_the_simulated_sources_are_as_slow_as_they_say() -> None:
    assert Transfer(SIZES, [source("a")]).seconds() == pytest.approx(sum(SIZES) / RATE, rel=0.05)
