"""The certificate that each sample is used once an epoch."""

from agent_client.step.rules.comparison import DataChoice, DataUses

CHOICE = DataChoice(100, 4, 2, 7)


def used(*steps: tuple[int, int]) -> DataUses:
    """Drawn from CHOICE and committed: (step, quorum_id)."""
    uses = DataUses()
    for step in steps:
        uses.drawn(CHOICE, *step)
        uses.committed(*step)
    return uses


def test_nothing_is_said_before_the_first_batch() -> None:
    uses = DataUses()
    uses.committed(0, 1)
    assert uses.report(3) == {}


def test_samples_are_counted_over_all_groups() -> None:
    report = used((0, 1), (1, 1), (2, 2)).report(27)
    assert report == {
        **CHOICE._asdict(),
        "samples": 216,
        "epoch": 2,
        "position": 16,
        "irregular_steps": 0,
        "is_exact": True,
    }


def test_a_step_with_a_batch_of_another_quorum_is_told() -> None:
    """As of salvage, which keeps what was computed; or of a loop that draws once and steps twice."""
    uses = used((0, 1))
    uses.drawn(CHOICE, 1, 1)
    uses.committed(1, 2)
    uses.committed(2, 2)
    report = uses.report(3)
    assert (report["irregular_steps"], report["is_exact"]) == (2, False)


def test_other_data_is_told() -> None:
    uses = used((0, 1))
    for step in (1, 2):
        uses.drawn(CHOICE._replace(length=50), step, 1)
        uses.committed(step, 1)
    assert (uses.report(2)["irregular_steps"], uses.report(2)["is_exact"]) == (0, False)
