from lighthouse.cli.tables import member_lines, member_rows, status_lines
from lighthouse_protocol.messages.status import LighthouseStatus, PreemptionStatus
from tests.lighthouse.statuses import job, member, status


def ending(*left_s: float | None) -> LighthouseStatus:
    notices = [PreemptionStatus("aws", "spot", f"h{n}", left, is_advice=False) for n, left in enumerate(left_s)]
    members = [member(f"g{n}", preemption=notice) for n, notice in enumerate(notices)]
    return status(job(*members, member("stays")))


def test_the_groups_that_end_first_are_named_first():
    lines = [
        line.plain.strip() for line in status_lines(ending(None, 30.0, 0.0, 90.0, 60.0), 200) if "ends" in line.plain
    ]
    assert [line.split(":")[0] for line in lines] == [
        "g2 ends in 0 s",
        "g1 ends in 30 s",
        "g4 ends in 60 s",
        "g3 ends in 90 s",
    ]
    text = "\n".join(line.plain for line in status_lines(ending(None, 30.0, 0.0, 90.0, 60.0), 200))
    assert "1 more group with a preemption notice" in text


def test_members_have_a_column_only_while_one_ends():
    shown = [line.plain.split()[-1] for line in member_lines(member_rows(ending(90.0, None)), 200)]
    assert shown == ["IN", "1m30s", "soon", "-"]
    assert "ENDS" not in member_lines(member_rows(status(job(member("a")))), 200)[0].plain
