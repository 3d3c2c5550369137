"""Loopback addresses of every kind beside routable ones, in every order: who cannot be reached has no place."""

from itertools import permutations

import pytest

from lighthouse.job.events import JoinRefused
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import Kind, is_loopback, loopback_error
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import WrongState
from tests.lighthouse.builders import group, join, machine

LITERAL = ["127.0.0.1:29512", "127.0.1.1:29512", "[::1]:29512", "[::ffff:127.0.0.1]:29512", "localhost:29512"]


def hidden(address: str = LITERAL[0], name: str = "h") -> Participant:
    """One that only its own host reaches."""
    return group(name, address=f"http://{address}", store_address=address)


NAMED = group("h", address="http://debian:29512", store_address="debian:29600", resolves_to_loopback=True)
STORE_ALONE = group("h", store_address="127.0.0.1:29600")
KINDS = [*map(hidden, LITERAL), NAMED, STORE_ALONE]
KIND_IDS = [*LITERAL, "a name that resolves to one", "the store alone"]


def come(quorum_machine: QuorumMachine, *participants: Participant) -> dict[str, str]:
    """They join one after the other; who was refused, by then or later, and why."""
    refused: dict[str, str] = {}
    for call, participant in enumerate(participants):
        for effect in quorum_machine.handle(join(call, participant), now=call):
            if isinstance(effect, JoinRefused):
                assert isinstance(effect.error, WrongState)
                refused[participants[effect.call].replica_id] = str(effect.error)
    return refused


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("min_replicas", [2, 3])
def test_whoever_came_first_the_hidden_one_goes_and_the_others_form_their_quorum(
    kind: Participant, order: tuple[int, ...], min_replicas: int
):
    everybody, quorum_machine = (kind, group("a"), group("b")), machine(min_replicas=min_replicas)
    refused = come(quorum_machine, *(everybody[i] for i in order))
    assert list(refused) == ["h"]
    assert refused["h"].startswith("address: h advertises a ")
    assert "beside a (a.example:29512)" in refused["h"] or "beside b (b.example:29512)" in refused["h"]
    assert "start its manager with --advertise" in refused["h"]
    members = quorum_machine.quorum.participants if quorum_machine.quorum is not None else ()
    assert [member.replica_id for member in members] == (["a", "b"] if min_replicas == 2 else [])


@pytest.mark.parametrize("one", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("other", LITERAL)
def test_all_on_loopbacks_is_fine(one: Participant, other: str):
    quorum_machine = machine(min_replicas=2)
    assert come(quorum_machine, one, hidden(other, "i")) == {}
    assert quorum_machine.quorum is not None


def test_one_whose_name_comes_to_resolve_to_a_loopback_has_no_place_any_more():
    quorum_machine = machine(min_replicas=3)
    assert come(quorum_machine, group("a"), group("b")) == {}
    moved = group("b", resolves_to_loopback=True)
    assert [type(effect) for effect in quorum_machine.handle(join(9, moved), now=9)] == [JoinRefused]


def test_one_that_resolves_elsewhere_again_is_welcome():
    quorum_machine = machine(min_replicas=2)
    assert come(quorum_machine, NAMED) == {}
    quorum_machine.handle(join(8, group("h", address="http://debian:29512", store_address="debian:29600")), now=8)
    counts = quorum_machine.job.counts
    assert (counts[Kind.ROUTABLE], counts[Kind.LOOPBACK]) == (1, 0)


def test_without_addresses_nothing_is_known():
    assert is_loopback(Participant("a")) is None
    assert is_loopback(Participant("a", resolves_to_loopback=True)) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (hidden("127.0.1.1:1"), "h advertises a loopback (http://127.0.1.1:1) beside a (a.example:29512)"),
        (STORE_ALONE, "h advertises a loopback (127.0.0.1:29600) beside"),
        (NAMED, "h advertises a name that is a loopback on its own host (http://debian:29512) beside"),
    ],
)
def test_the_message_names_the_address_that_is_at_fault(kind: Participant, words: str):
    assert words in str(loopback_error(kind, group("a")))
