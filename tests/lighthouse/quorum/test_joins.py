"""Who asks, since when, until when."""

from hypothesis import given
from hypothesis import strategies as st

from agent_client.step.config import AgentConfig
from lighthouse.job.events import QuorumFormed
from lighthouse.job.records import Group, QuorumConfig, QuorumRecord
from lighthouse.job.roster import Job
from lighthouse_protocol.limits import ANSWER_MARGIN_S, JOIN_TIMEOUT_S, QUORUM_TIMEOUT_S
from lighthouse_protocol.messages.membership import Quorum
from tests.lighthouse.builders import beat, beating, group, join, machine

MEMBERS = ("g0", "g1", "g2")


def member(name: str, **fields: object) -> Group:
    return Group(name, "i1", 0, participant=group(name, **fields), is_participant=name in MEMBERS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 50)), max_size=30))
def test_the_earliest_deadline_is_the_earliest(events: list[tuple[bool, int, int]]):
    job = Job(QuorumConfig(), QuorumRecord(1, Quorum(1, tuple(map(group, MEMBERS)))))
    job.groups = {f"g{number}": member(f"g{number}") for number in range(6)}
    joins = job.joins
    waiting: dict[int, int] = {}
    for joined, call, deadline_at in events:
        if joined and call not in waiting:
            joins.add(job.groups[f"g{call}"], call, deadline_at, 0)
            waiting[call] = deadline_at
        elif not joined:
            joins.withdraw(f"g{call}", call, 0)
            waiting.pop(call, None)
        assert joins.earliest_deadline_at == min(waiting.values(), default=None)
        of_members = (until for number, until in waiting.items() if f"g{number}" in MEMBERS)
        assert joins.members_deadline_at == min(of_members, default=None)


class TestTimeouts:
    def test_by_default_a_call_outlives_the_wait_for_a_straggler(self) -> None:
        default = AgentConfig().quorum_timeout_s
        assert default >= QuorumConfig().join_timeout_s + QuorumConfig().lease_s + ANSWER_MARGIN_S

    @given(
        join_timeout_s=st.floats(1, 60),
        asked_after_s=st.floats(0, 4),
        slack_s=st.floats(QUORUM_TIMEOUT_S - JOIN_TIMEOUT_S, 90),
    )
    def test_a_straggler_costs_no_caller_its_call(
        self, join_timeout_s: float, asked_after_s: float, slack_s: float
    ) -> None:
        m = machine(join_timeout_s=join_timeout_s)
        beating(m, "ab", 0.0, asked_after_s)
        m.handle(beat("b"), asked_after_s)
        deadline_at = asked_after_s + join_timeout_s + slack_s
        effects = [*m.handle(join(1, "a", deadline_at), asked_after_s)]
        effects += beating(m, "ab", asked_after_s, deadline_at - slack_s / 2)
        assert [e.calls for e in effects if isinstance(e, QuorumFormed)] == [(1,)]
