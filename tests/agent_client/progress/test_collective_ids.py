"""The numbers of collectives are the same at all ranks, however many a group has of its own."""

from agent_client.progress.rules import CollectiveIds, Entry
from lighthouse_protocol.messages.progress import Collective


def order(numbers: CollectiveIds, entry: Entry, *, within_group: bool) -> tuple[int, int, int]:
    return numbers.number_of(entry, within_group=within_group)


def test_each_comes_after_the_one_before() -> None:
    numbers = CollectiveIds()
    numbers.begin(7, numbers.over_groups)
    told = [order(numbers, numbers.inside(), within_group=True) for _ in range(2)]
    for _ in range(2):
        entry = numbers.over()
        told += [order(numbers, entry, within_group=True), order(numbers, entry, within_group=False)]
        told.append(order(numbers, numbers.inside(), within_group=True))
    assert told == sorted(set(told))
    assert told[:4] == [(7, 0, 1), (7, 0, 2), (7, 1, 0), (7, 2, 0)]


def test_a_group_s_own_collectives_move_no_other_group_s_numbers() -> None:
    busy, other = CollectiveIds(), CollectiveIds()
    for _ in range(5):
        busy.inside()
    both = [numbers.number_of(numbers.over(), within_group=False) for numbers in (busy, other)]
    assert both[0] == both[1]


def test_a_new_quorum_counts_anew_from_the_step_that_asked_for_it() -> None:
    veteran, newcomer = CollectiveIds(), CollectiveIds()
    for _ in range(9):
        veteran.over()
    asked_for = veteran.over_groups
    before_the_answer = veteran.inside()
    entry = veteran.over()  # the script goes on while the quorum is asked for
    for numbers, so_many in ((veteran, asked_for), (newcomer, 0)):
        numbers.begin(3, so_many)
        numbers.begin(3, so_many + 4)  # the quorum of the next step is the same one
    assert (
        veteran.number_of(entry, within_group=False)
        == newcomer.number_of(newcomer.over(), within_group=False)
        == (3, 2, 0)
    )
    assert veteran.number_of(before_the_answer, within_group=True) == (3, 0, 1)


def test_told_is_what_collectives_are_compared_by() -> None:
    numbers = CollectiveIds()
    numbers.over()
    told = numbers.number_of(numbers.inside(), within_group=True)
    collective = Collective(told.quorum_id, told.number, "broadcast", inner=told.inner)
    assert collective.order == told == (0, 2, 1)
