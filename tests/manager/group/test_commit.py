"""The votes for a step: as text, what each leads to. Drawn votes are in test_group_properties.py.

ranks=2                         a group of two, with nothing decided
Opened(1, 5); yes(1, 0)         events: call 1 is the yes of rank 0; by default for step 5 of no named quorum
no(2, 1, of=1)                  call 2 is a no of rank 1 that names quorum 1
    1/5 discarded               and what follows: step 5 of quorum 1, and the answers to the calls
    1: discard; 2: discard
"""

from pathlib import Path

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
