"""An honest rank of a replica group, and its manager's lease reckoned once more."""

from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import Assignment


@dataclass
class Rank:
    """`granted` is the step in flight; a yes that was voted binds: it is repeated until the decision is known."""

    number: int
    life: int = 0
    watch: int | None = None
    step: int = 0
    tag: int = 0
    failures: int = 0
    call: int | None = None
    granted: Assignment | None = None
    vote: bool | None = None
    since: float = 0.0

    @property
    def rank_incarnation(self) -> str:
        return f"w{self.number}.{self.life}"

    def decided(self, is_commit: bool, following: Assignment | None) -> None:
        assert self.granted is not None
        if is_commit:
            self.step, self.tag, self.failures = self.granted.max_step + 1, self.granted.quorum_id, 0
        else:
            self.failures += 1
        self.granted, self.vote = following, None


@dataclass
class Call:
    rank: Rank
    deadline_at: float


@dataclass
class Lease:
    """Reckoned from what was sent and echoed."""

    lease_s: float
    sent_at: dict[int, float] = field(default_factory=dict)
    until: float = 0.0

    def echoed(self, number: int) -> None:
        if number in self.sent_at:
            self.until = max(self.until, self.sent_at[number] + 0.8 * self.lease_s)
