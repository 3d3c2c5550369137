"""Lives of one lighthouse on one journal file, driven as the daemon drives it, on a virtual clock.

A manager here is dumb: it sends what the test says, and keeps what it hears.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from lighthouse.job.driver import JobDriver
from lighthouse.job.records import QuorumConfig
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse.job.store import MemoryStore
from lighthouse.store.sqlite import Journal
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    QuorumOrder,
    QuorumPhase,
    ToManager,
)
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
from tests.lighthouse.sessions import native, secret_of
from tests.virtual_loop import VirtualLoop

FIRST_WALL_MS = 1_700_000_000_000
JOB = "j"


class Life:
    """A lighthouse from its start to its end. `heard` is called with each quorum that leaves it, before it arrives."""

    def __init__(
        self,
        loop: VirtualLoop,
        path: Path | None,
        heard: Callable[[Quorum], None] = lambda quorum: None,
        wall_ms: int | None = None,
        **config: object,
    ) -> None:
        self.loop, self.heard = loop, heard
        self.gave_up: list[int] = []
        self.wall_ms = FIRST_WALL_MS + round(loop.time() * 1000) if wall_ms is None else wall_ms
        self.began_at = loop.time()
        self.memory = MemoryStore() if path is None else Journal(path)
        self.jobs = JobRegistry(
            QuorumConfig(**config),  # pyright: ignore[reportArgumentType]
            Ports(
                loop,
                lambda: self.wall_ms / 1000 + (loop.time() - self.began_at),
                draw_secret=lambda: token_hex(SECRET_BYTES),
            ),
            self.memory,
            self.gave_up.append,
        )
        self.managers: list[Manager] = []
        if self.memory.claim():
            self.jobs.load_records(self.memory.load())

    @property
    def driver(self) -> JobDriver:
        return self.jobs.get_job(JOB)

    def scrape(self) -> None:
        """As /metrics and `lighthouse status` do."""
        self.jobs.forget_quiet()

    def die(self) -> None:
        """What it would have said in its last moment is not heard."""
        for manager in self.managers:
            manager.life = None
        self.jobs.close("dead")
        self.memory.release()


@dataclass
class Manager:
    name: str
    incarnation: str = "i1"
    life: Life | None = None
    session: int = 0
    joins: int = 0
    beats: int = 0
    step: int = 0
    tag: int | None = 0
    seen: int = 0
    held: HeldQuorum | None = None
    heard: list[ToManager] = field(default_factory=list)
    ended: LighthouseError | None = None

    @property
    def me(self) -> Participant:
        tags = {"tag_quorum_id": self.tag, "seen_quorum_id": self.seen}
        return native(self.name, self.step, self.incarnation, **tags)

    def connect(self, life: Life) -> "Manager":
        self.life, self.ended = life, None
        life.managers.append(self)
        self.session = life.driver.open_session(Hello(self.me, GroupReport(self.held), secret_of(self.name)), self)
        return self

    def cut(self) -> None:
        """The connection carries nothing more, and the lighthouse has not noticed."""
        self.life = None

    def close(self) -> None:
        """The connection ends."""
        assert self.life is not None
        life, self.life = self.life, None
        life.driver.end_session(self.session)

    def join(self, time_left_s: float = 1e5) -> None:
        assert self.life is not None
        self.joins += 1
        self.life.driver.receive_from_manager(self.session, JoinRequest(self.joins, self.me, time_left_s))

    def beat(self) -> None:
        assert self.life is not None
        self.beats += 1
        self.life.driver.receive_from_manager(self.session, Heartbeat(self.beats, GroupReport(self.held)))

    # -- a Peer

    def send(self, message: ToManager) -> None:
        told = SESSION_RESPONSES.read(SESSION_RESPONSES.write(message))
        if self.life is None or told is None:
            return
        if isinstance(told, JoinAccepted):
            self.life.heard(told.quorum)
            self.seen = max(self.seen, told.quorum.quorum_id)
            self.held = HeldQuorum(told.quorum.quorum_id, HoldState.STANDING, self.step) if told.stands else None
        if isinstance(told, QuorumOrder) and told.phase is QuorumPhase.REVOKED:
            self.held = None
        self.heard.append(told)

    def end(self, error: LighthouseError | None) -> None:
        self.ended = error

    # -- what it was told

    @property
    def quorum(self) -> Quorum | None:
        """The newest."""
        return next((message.quorum for message in reversed(self.heard) if isinstance(message, JoinAccepted)), None)

    @property
    def quorum_id(self) -> int:
        return self.quorum.quorum_id if self.quorum else 0

    @property
    def refusal(self) -> LighthouseError | None:
        """Of its newest join."""
        refused = [message for message in self.heard if isinstance(message, JoinRejected)]
        return refused[-1].error if refused else None


def beat_for(loop: VirtualLoop, managers: list[Manager], seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        loop.go(0.5)
        for manager in managers:
            manager.beat()


def connected(life: Life, names: str) -> list[Manager]:
    return [Manager(name).connect(life) for name in names]


def formed(life: Life, names: str) -> list[Manager]:
    """Groups of these names hold a quorum that stands."""
    managers = connected(life, names)
    for manager in managers:
        manager.join()
    while not managers[0].quorum_id:  # with a journal that is new or was lost, after a lease
        beat_for(life.loop, managers, 0.5)
    assert len({manager.quorum_id for manager in managers}) == 1
    assert managers[0].quorum_id > 0
    return managers
