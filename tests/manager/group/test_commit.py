"""The votes for a step: as text, what each leads to; and drawn events against a witness.

ranks=2                         a group of two, with nothing decided
Opened(1, 5); yes(1, 0)         events: call 1 is the yes of rank 0; by default for step 5 of no named quorum
no(2, 1, of=1)                  call 2 is a no of rank 1 that names quorum 1
    1/5 discarded               and what follows: step 5 of quorum 1, and the answers to the calls
    1: discard; 2: discard
"""

from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from manager.group.rules import commit
from tests.manager.scripts import player
from tests.scenarios.paragraphs import scenarios_of


def yes(call: int, rank: int, step: int = 5, of: int | None = None) -> commit.Voted:
    return commit.Voted(call, rank, step, True, of)


def no(call: int, rank: int, step: int = 5, of: int | None = None) -> commit.Voted:
    return commit.Voted(call, rank, step, False, of)


def show(effect: commit.Effect) -> str:
    match effect:
        case commit.StepDecided(quorum_id, step, is_commit):
            return f"{quorum_id}/{step} {'committed' if is_commit else 'discarded'}"
        case commit.Decided(call, is_commit):
            return f"{call}: {'commit' if is_commit else 'discard'}"
        case commit.VoteRefused(call, error):
            return f"{call}: {type(error).__name__}: {error}"


class Group:
    """That the text tells."""

    def __init__(self, size: int) -> None:
        self.machine = commit.CommitMachine(size)

    def tell(self, line: str) -> list[str]:
        return [said for word in line.split("; ") for said in self.follows(eval(word, WORDS))]  # of a file of ours

    def follows(self, event: commit.Event) -> list[str]:
        """On one line, unless a refusal is among them."""
        effects = self.machine.handle(event)
        shown = [show(effect) for effect in effects]
        has_refusal = any(isinstance(effect, commit.VoteRefused) for effect in effects)
        return shown if has_refusal or not shown else ["; ".join(shown)]


WORDS = vars(commit) | {"yes": yes, "no": no}
play = player(lambda line: Group(int(line.removeprefix("ranks="))) if line.startswith("ranks=") else None)


@scenarios_of(Path(__file__).with_name("commit.txt"), play)
def test_what_a_vote_leads_to(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_decisions_are_kept_for_the_last_sixteen():
    m = commit.CommitMachine(1)
    for step in range(commit.DECISIONS_KEPT + 1):
        m.handle(commit.Opened(1, step))
        m.handle(yes(step, 0, step))
    assert m.handle(yes(100, 0, step=1, of=1)) == [commit.Decided(100, True)]
    assert len(m._decided) == commit.DECISIONS_KEPT
    assert (m.commits, m.discards, m.is_voting) == (commit.DECISIONS_KEPT + 1, 0, False)


# -- drawn events

SIZE = 2
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(
            st.just("vote"),
            st.integers(-1, SIZE),
            st.integers(-1, 1),
            st.sampled_from([True, True, True, False]),
            st.sampled_from([None, None, 0, -1]),
        ),
        st.tuples(st.just("vote"), st.integers(0, SIZE - 1), st.just(0), st.just(True), st.just(None)),
        st.tuples(st.just("withdraw"), st.integers(0, SIZE - 1)),
    ),
    max_size=60,
)


@dataclass(frozen=True)
class Cast:
    """A vote that counts: its call is open, or it is bound. (quorum_id, step) is what it is for."""

    key: tuple[int, int]
    rank: int
    vote: bool
    is_bound: bool = False


class Witness:
    """Knows the votes that count and what was decided, and judges every decision by them."""

    def __init__(self) -> None:
        self.machine = commit.CommitMachine(SIZE)
        self.quorum_id, self.step = 1, 5
        self.open: dict[int, Cast] = {}
        self.decisions: dict[tuple[int, int], bool] = {}
        self.told: dict[tuple[int, int], set[int]] = {}
        self.feed(commit.Opened(1, 5))

    def feed(self, event: commit.Event) -> None:
        effects = list(self.machine.handle(event))
        decided: dict[int, bool] = {}
        for effect in effects:
            match effect:
                case commit.Decided(call, is_commit):
                    decided[call] = is_commit
                case commit.VoteRefused(call):
                    assert call in self.open
                    del self.open[call]
        if decided:
            assert isinstance(event, commit.Voted)
            self._check(self.open[event.call], decided)
        for call in decided:
            del self.open[call]
        assert self.machine.is_voting == bool(self.open)

    def _check(self, last: Cast, decided: dict[int, bool]) -> None:
        commits = set(decided.values())
        assert len(commits) == 1, "everyone gets the same decision"
        is_commit = commits.pop()
        waiting = [self.open[call] for call in decided]
        assert {cast.key for cast in waiting} == {last.key}
        known = self.decisions.get(last.key)
        is_next_try = is_commit and not known and len(self.told.get(last.key, ())) == SIZE and not last.is_bound
        if known is None or is_next_try:
            self._check_first(last, waiting, is_commit)  # the next try is made where all were told of a discard
            self.told[last.key] = set()
        else:
            assert is_commit == (known and last.vote), "a late or repeated voter gets the decision that was made"
            is_commit = known
        self.decisions[last.key] = is_commit
        self.told[last.key] |= {cast.rank for cast in waiting}

    def _check_first(self, last: Cast, waiting: list[Cast], is_commit: bool) -> None:
        if is_commit:
            assert sorted(cast.rank for cast in waiting) == list(range(SIZE)), "every rank"
            assert all(cast.vote for cast in waiting)
        else:
            assert not last.vote, "only a no discards"
            assert len(self.open) == len(waiting), "and everybody who waits hears it"

    def ends(self, rank: int) -> None:
        """The newest call of that rank. What is bound goes on to count."""
        gone = max((call for call, cast in self.open.items() if cast.rank == rank), default=10_000)
        if gone in self.open and not self.open[gone].is_bound:
            del self.open[gone]
        self.feed(commit.Withdrawn(gone))

    def opens(self, quorum_id: int, step: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.decisions.pop((quorum_id, step), None)
        self.feed(commit.Opened(quorum_id, step))
        assert not self.open, "who waited in the attempt that is given up has learnt so"


def run(drawn: list[tuple], witness: Witness) -> None:
    for call, (what, *details) in enumerate(drawn, start=1):
        match what:
            case "open":
                witness.opens(witness.quorum_id + details[0], witness.step + details[1])
            case "vote":
                rank, ahead, vote, older = details
                quorum_id = None if older is None else witness.quorum_id + older
                step = witness.step + ahead
                key = (witness.quorum_id if quorum_id is None else quorum_id, step)
                witness.open[call] = Cast(key, rank, vote, vote and quorum_id is not None)
                witness.feed(commit.Voted(call, rank, step, vote, quorum_id))
            case "withdraw":
                witness.ends(details[0])


@settings(max_examples=300)
@given(events)
def test_a_commit_is_what_every_rank_wants(drawn: list[tuple]):
    run(drawn, Witness())
