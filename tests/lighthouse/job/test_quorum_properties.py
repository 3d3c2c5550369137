"""The machine against a plain reference (plain_quorum.py), under drawn configurations and drawn events."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.job import events
from lighthouse.job.records import QuorumConfig, Verdict
from lighthouse_protocol.messages.membership import Participant
from tests.lighthouse.builders import AnswersOnly, beat, group
from tests.lighthouse.plain_quorum import PlainQuorum

NAMES = "abcd"
MOMENTS = (0.0, 0.0, 0.1, 1.0, 2.5, 4.9, 5.0, 5.1, 12.0, 29.0, 30.0, 60.0, 61.0, 200.0)


@dataclass(frozen=True)
class Step:
    """After `wait` seconds, `what` happens to group number `who`."""

    what: str
    who: str
    wait: float = 0.0
    time_left: float = 1000.0
    fields: tuple[tuple[str, Any], ...] = ()


@st.composite
def configs(draw: st.DrawFn) -> QuorumConfig:
    min_replicas = draw(st.integers(1, 4))
    largest = draw(st.sets(st.integers(1, 6), max_size=3))
    sizes = frozenset(largest | {min_replicas}) if largest else frozenset()
    return QuorumConfig(
        min_replicas=min_replicas,
        join_timeout_s=draw(st.sampled_from([1.0, 10.0, 60.0])),
        heartbeat_timeout_s=draw(st.sampled_from([0.5, 5.0, 30.0])),
        deadline_margin_s=draw(st.sampled_from([0.0, 1.0])),
        allowed_sizes=sizes,
        active=draw(st.none() | st.integers(min_replicas, 6)),
        last_call_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
        allow_heterogeneous=draw(st.booleans()),
        max_replicas=draw(st.sampled_from([4, 10_000])),
        first_quorum_id=draw(st.sampled_from([1, 1000])),
    )


WHATS = ("join", "join", "round", "round", "round", "beat", "all beat", "withdraw", "nothing")
TIMES_LEFT = (0.5, 8.0, 60.0, 1000.0)
ODD_FIELDS = (
    *[("incarnation", incarnation) for incarnation in ("i2", "i3", "")],
    *[("step", step) for step in (0, 1, 2, 3)],
    *[("shrink_only", True)] * 3,
    *[("commit_failures", 1)] * 2,
    *[("address", address) for address in ("other.example:1", "127.0.0.1:1", "")],
    *[("group_world_size", size) for size in (0, 2)],
    *[("tag_quorum_id", tag) for tag in (0, 1, 3)],
    *[("seen_quorum_id", seen) for seen in (3, 2000)],
    ("ranks_disagree", True),
)
steps = st.builds(
    Step,
    what=st.sampled_from(WHATS),
    who=st.sampled_from(NAMES),
    wait=st.sampled_from(MOMENTS),
    time_left=st.sampled_from(TIMES_LEFT),
    fields=st.lists(st.sampled_from(ODD_FIELDS), max_size=2).map(tuple),
)
stories = st.tuples(configs(), st.lists(steps, max_size=6) | st.lists(steps, min_size=12, max_size=30), st.booleans())


class Story:
    """Feeds a machine and has every answer checked. A punctual driver ticks at each deadline; a late one never."""

    def __init__(self, config: QuorumConfig, *, is_punctual: bool = True) -> None:
        self.machine = AnswersOnly(config)
        self.plain = PlainQuorum(self.machine)
        self.is_punctual = is_punctual
        self.now = 0.0
        self.calls = 0
        self.formed: list[events.QuorumFormed] = []

    def tell(self, step: Step) -> None:
        self.wait(step.wait)
        match step.what:
            case "join":
                self.join(group(step.who, **dict(step.fields)), step.time_left)
            case "round":
                self.round(step)
            case "beat":
                self.feed(beat(step.who, dict(step.fields).get("incarnation", "i1")))
            case "all beat":
                for name in NAMES:
                    self.feed(beat(name))
            case "withdraw":
                member = self.machine.job.groups.get(step.who)
                self.feed(events.Withdrawn(step.who, member.call if member and member.call else self.calls + 1000))
            case _:
                self.feed(None)

    def join(self, participant: Participant, time_left: float = 1000.0) -> None:
        self.calls += 1
        self.feed(events.Joined(self.calls, participant, self.now + time_left))

    def round(self, step: Step) -> None:
        """Everybody who trained and does not wait asks again; `who` among them with fields of its own."""
        for name in sorted(self.plain.previous):
            member = self.machine.job.groups.get(name)
            if member is not None and member.participant is not None and member.call is None:
                fields = step.fields if name == step.who else ()
                again = replace(member.participant, commit_failures=0, shrink_only=False)
                self.join(replace(again, **dict(fields)), step.time_left)

    def end_all_calls(self) -> None:
        for member in list(self.machine.job.groups.values()):
            if member.call is not None:
                self.feed(events.Withdrawn(member.replica_id, member.call))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.is_punctual and (due := self.machine.deadline(self.now)) is not None and due <= until:
            self.now = due
            self.feed(None)
        self.now = until

    def feed(self, event: events.QuorumEvent | None) -> None:
        effects = list(self.machine.handle(event, self.now) if event else self.machine.tick(self.now))
        self.plain.check(event, effects, self.now)
        self.formed += [effect for effect in effects if isinstance(effect, events.QuorumFormed)]
        assert self.machine.decision.verdict is not Verdict.READY


def told(config: QuorumConfig, happenings: list[Step], *, is_punctual: bool = True) -> Story:
    story = Story(config, is_punctual=is_punctual)
    for step in happenings:
        story.tell(step)
    return story


@settings(max_examples=300)
@given(stories)
def test_every_answer_follows_from_the_rules(story: tuple[QuorumConfig, list[Step], bool]):
    config, happenings, is_punctual = story
    told(config, happenings, is_punctual=is_punctual)


@settings(max_examples=50)
@given(stories)
def test_nothing_is_remembered_of_those_who_have_gone(story: tuple[QuorumConfig, list[Step], bool]):
    job = told(*story[:2])
    job.end_all_calls()
    job.wait(10_000)
    assert job.machine.is_quiet(job.now)
    assert job.machine.deadline(job.now) is None
    assert (len(job.machine.job._due), len(job.machine.joins)) == (0, 0)


@settings(max_examples=60)
@given(stories, st.sets(st.sampled_from(NAMES), min_size=1), st.permutations(NAMES), st.integers(0, 3))
def test_when_all_who_live_ask_a_quorum_forms_by_join_timeout(
    story: tuple[QuorumConfig, list[Step], bool], living: set[str], order: list[str], zombies: int
):
    """Whatever went before. Zombies beat and never ask."""
    config = story[0]
    job = told(*story[:2])
    job.end_all_calls()
    job.wait(200)  # all have lapsed
    dead = [name for name in order if name not in living][:zombies]
    asking = [name for name in order if name in living]
    for name in [*dead, *asking]:
        job.feed(beat(name, "i9"))
    begun_at, before = job.now, len(job.formed)
    for name in asking:
        if job.machine.job.groups.get(name):
            job.join(group(name, incarnation="i9"))
        job.wait(0.01)
    while len(job.formed) == before and job.now < begun_at + config.join_timeout_s + 0.1:
        for name in dead:
            job.feed(beat(name, "i9"))
        job.wait(config.heartbeat_timeout_s / 2)
    taken = len(asking) if config.max_replicas > len(living) + len(dead) else 0
    if may_form(config, taken):
        assert len(job.formed) > before


def may_form(config: QuorumConfig, asking: int) -> bool:
    sizes = [n for n in range(config.min_replicas, asking + 1) if not config.active or n <= config.active]
    return any(not config.allowed_sizes or n in config.allowed_sizes for n in sizes)


def test_the_witness_notices_an_answer_to_a_call_that_ended():
    plain = PlainQuorum(AnswersOnly(QuorumConfig()))
    effects: list[events.QuorumEffect] = [events.JoinRefused(7, RuntimeError())]  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="did not wait"):
        plain.check(events.HeartbeatReceived("a"), effects, 0.0)
