"""The votes for a step: as text, what each leads to; and drawn events against a witness.

ranks=2                         a group of two, with nothing decided
Opened(1, 5); yes(1, 0)         events: call 1 is the yes of rank 0; by default for step 5 of no named quorum
no(2, 1, of=1)                  call 2 is a no of rank 1 that names quorum 1
    1/5 discarded               and what follows: step 5 of quorum 1, and the answers to the calls
    1: discard; 2: discard
"""

from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import Decision, Distrust, DistrustKind, Participant
from lighthouse_protocol.messages.session import HoldState, VoteAnswer
from manager.group import events
from manager.group.events import PendingVote
from manager.group.records import ReplicaGroup, StandingQuorum
from manager.group.votes import DECISIONS_KEPT, Votes
from tests.manager.builders import ask
from tests.manager.groups import formed
from tests.manager.scripts import player
from tests.scenarios.paragraphs import scenarios_of


def yes(call: int, rank: int, step: int = 5, of: int | None = None) -> PendingVote:
    return PendingVote(call, rank, step, True, of)


def no(call: int, rank: int, step: int = 5, of: int | None = None) -> PendingVote:
    return PendingVote(call, rank, step, False, of)


class Group:
    """A group that holds a standing quorum, and what its votes lead to."""

    def __init__(self, size: int) -> None:
        self.records = ReplicaGroup(Participant("a", group_world_size=size))
        self.records.standing = StandingQuorum(formed(), HoldState.STANDING, 0, 0, 0)
        self.votes = Votes(self.records)
        self.words = {
            "yes": lambda *vote, **says: self.vote(yes(*vote, **says)),
            "no": lambda *vote, **says: self.vote(no(*vote, **says)),
            "Opened": self.open,
            "Withdrawn": lambda call: self.votes.withdraw(call) or [],
            "RankLost": lambda rank: self.follows(self.votes.note_loss(rank)),
            "RankMissed": lambda rank, reason: self.follows(self.votes.give_up_rank(rank, reason)),
            "Asked": self.ask,
        }

    def vote(self, vote: PendingVote) -> list[object]:
        return [*self.follows(self.votes.infer_decision(vote)), *self.follows(self.votes.count_vote(vote))]

    def open(self, quorum_id: int, step: int) -> list[object]:
        return self.follows(self.votes.open(quorum_id, step))

    def follows(self, commit: bool | None) -> list[object]:
        """The effects, and what the decision of an attempt leads to."""
        effects: list[object] = [*self.records.effects]
        self.records.effects.clear()
        if commit is not None:
            attempt = self.records.attempt
            assert attempt is not None
            effects.append(f"{attempt.quorum_id}/{attempt.step} {'committed' if commit else 'discarded'}")
            effects += [VoteAnswer(vote.call, Decision(commit)) for vote in self.votes.decide(commit)]
        return effects

    def tell(self, line: str) -> list[str]:
        return [said for word in line.split("; ") for said in self.show(eval(word, self.words))]  # of a file of ours

    def ask(
        self, rank: int, step: int, tag: int | None, *, has_failed: bool, torn: tuple[int, int] | None = None
    ) -> list[object]:
        distrust = Distrust(DistrustKind.NOT_APPLIED, "torn", *torn) if torn is not None else None
        says = {"tag_quorum_id": tag, "commit_failures": int(has_failed), "distrust": distrust}
        return self.follows(self.votes.note_request(ask(0, rank, step, **says)))

    def show(self, effects: list[object]) -> list[str]:
        """On one line, unless a refusal is among them."""
        shown = [show(effect) for effect in effects]
        has_refusal = any(isinstance(effect, events.CallRefused) for effect in effects)
        return shown if has_refusal or not shown else ["; ".join(shown)]


def show(effect: object) -> str:
    match effect:
        case VoteAnswer(call, Decision(is_commit)):
            return f"{call}: {'commit' if is_commit else 'discard'}"
        case events.CallRefused(call, error):
            return f"{call}: {type(error).__name__}: {error}"
        case _:
            return str(effect)


play = player(lambda line: Group(int(line.removeprefix("ranks="))) if line.startswith("ranks=") else None)


@scenarios_of(Path(__file__).with_name("commit.txt"), play)
def test_what_a_vote_leads_to(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_decisions_are_kept_for_the_last_sixteen():
    m = Group(1)
    for step in range(DECISIONS_KEPT + 1):
        m.open(1, step)
        m.vote(yes(step, 0, step))
    assert m.vote(yes(100, 0, step=1, of=1)) == [VoteAnswer(100, Decision(True))]
    assert len(m.records.decided) == DECISIONS_KEPT
    assert not m.votes.is_voting
    newest = DECISIONS_KEPT
    m.open(2, newest + 1)
    assert m.vote(yes(101, 0, step=newest, of=1)) == [VoteAnswer(101, Decision(True))], "the oldest are forgotten first"
    [refused] = m.vote(yes(102, 0, step=0, of=1))
    assert isinstance(refused, events.CallRefused)


# -- drawn events

SIZE = 2
Key = tuple[int, int]
votes = st.sampled_from([True, True, True, False])
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.booleans(), st.integers(0, 1)),
        st.tuples(
            st.just("vote"), st.integers(0, SIZE - 1), st.sampled_from([True, True, True, False]), st.integers(-1, 1)
        ),
        st.tuples(st.just("vote"), st.integers(0, SIZE - 1), st.just(True), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, SIZE - 1)),
    ),
    min_size=12,
    max_size=60,
)


class Witness:
    """Knows the votes that count, and judges every decision by them."""

    def __init__(self) -> None:
        self.machine = Group(SIZE)
        self.open: dict[int, PendingVote] = {}
        self.opened: list[Key] = []  # what a rank may name: its votes for anything else would tell of decisions
        self.wants: defaultdict[Key, set[int]] = defaultdict(set)  # the ranks whose yes counts
        self.refused: set[Key] = set()  # by a rank
        self.committed: set[Key] = set()
        self.opens(1, 5)

    def key(self, vote: PendingVote) -> Key:
        return self.quorum_id if vote.quorum_id is None else vote.quorum_id, vote.step

    def follows(self, effects: list[object]) -> None:
        answers = {e.number: e.outcome.commit for e in effects if isinstance(e, VoteAnswer)}
        assert len(set(answers.values())) <= 1, "everyone gets the same decision"
        for call, is_commit in answers.items():
            vote = self.open.pop(call)
            key = self.key(vote)
            if is_commit:
                assert vote.vote
                assert self.wants[key] == set(range(SIZE)), "every rank"
                self.committed.add(key)
            else:
                assert key in self.refused, "only a no discards"
                assert not vote.vote or key not in self.committed, "a late or repeated voter gets what was decided"
                self.wants[key] -= {vote.group_rank} if vote.vote else set()
        for effect in effects:
            if isinstance(effect, events.CallRefused):
                del self.open[effect.call]
        assert self.machine.votes.is_voting == bool(self.open)

    def votes(self, vote: PendingVote) -> None:
        self.open[vote.call] = vote
        if vote.vote:
            self.wants[self.key(vote)].add(vote.group_rank)
        else:
            self.refused.add(self.key(vote))
        self.follows(self.machine.vote(vote))

    def ends(self, rank: int) -> None:
        """The newest call of that rank. A yes that names its quorum goes on to count."""
        gone = max((call for call, vote in self.open.items() if vote.group_rank == rank), default=10_000)
        if gone in self.open and (self.open[gone].quorum_id is None or not self.open[gone].vote):
            self.wants[self.key(self.open.pop(gone))].discard(rank)
        self.machine.votes.withdraw(gone)
        assert self.machine.votes.is_voting == bool(self.open)

    def opens(self, quorum_id: int, step: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.opened.append((quorum_id, step))
        self.wants.pop((quorum_id, step), None)
        self.refused.discard((quorum_id, step))
        self.committed.discard((quorum_id, step))
        self.follows(self.machine.open(quorum_id, step))
        assert not self.open, "who waited in the attempt that is given up has learnt so"


@settings(max_examples=300)
@given(happenings, st.booleans())
def test_a_commit_is_what_every_rank_wants(drawn: list[tuple], names_quorums: bool):
    witness = Witness()
    for call, (what, *details) in enumerate(drawn, start=1):
        match what:
            case "open":
                is_next, ahead = details
                stands = not ahead or (witness.quorum_id, witness.step) in witness.committed
                witness.opens(witness.quorum_id + (is_next or not stands), witness.step + ahead)
            case "vote":
                rank, vote, ahead = details
                quorum_id, step = None, witness.step + ahead
                if names_quorums:
                    quorum_id, step = witness.opened[ahead % len(witness.opened) - 1]
                witness.votes(PendingVote(call, rank, step, vote, quorum_id))
            case "withdraw":
                witness.ends(details[0])
