"""The coordinator as text: what a join string says, what is refused, and who shows the token: join_string() alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.coordinator import Coordinator, parse_coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import DeadlinePassed, InvalidRequest, NotLeader, Unreachable

PIN = "0123456789abcdef" * 4
TOKEN = "lhj_" + "x" * 43
HERE = Address("coordinator", 29510)

HOSTS = st.sampled_from(["coordinator", "10.0.0.1", "2001:db8::1", "a-b.example", "::1"])
ADDRESSES = st.builds(Address, HOSTS, st.integers(1, 65535))
TOKENS = st.text("abcXYZ019_-", min_size=1, max_size=60)
COORDINATORS = st.builds(
    Coordinator,
    st.lists(ADDRESSES, min_size=1, max_size=4).map(tuple),
    st.one_of(st.just(""), st.text("0123456789abcdef", min_size=64, max_size=64)),
    TOKENS,
)


@given(COORDINATORS)
def test_a_join_string_is_read_as_it_was_written(coordinator: Coordinator) -> None:
    assert parse_coordinator(coordinator.join_string()) == coordinator
    plain = Coordinator(coordinator.addresses)
    assert parse_coordinator(plain.join_string()) == plain


@given(COORDINATORS)
def test_only_the_join_string_shows_the_token(drawn: Coordinator) -> None:
    coordinator = replace(drawn, token="lhj_" + drawn.token)
    assert coordinator.token not in str(coordinator) + repr(coordinator) + f"{coordinator} {coordinator!r}"


@pytest.mark.parametrize(
    ("text", "coordinator"),
    [
        ("coordinator", Coordinator((HERE,))),
        ("http://coordinator:29510/", Coordinator((HERE,))),
        ("a:1, [::1]:2,::1", Coordinator((Address("a", 1), Address("::1", 2), Address("::1", 29510)))),
        (f" lighthouse://{PIN.upper()}.{TOKEN}@coordinator\n", Coordinator((HERE,), PIN, TOKEN)),
        (f"lighthouse://insecure.{TOKEN}@a:1,b:2", Coordinator((Address("a", 1), Address("b", 2)), "", TOKEN)),
    ],
)
def test_what_may_be_written(text: str, coordinator: Coordinator) -> None:
    assert parse_coordinator(text) == coordinator


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"lighthouse://{PIN}.{TOKEN}", "the join string has no @ before its address"),
        (f"lighthouse://{PIN[:-1]}.{TOKEN}@h", "the pin of the join string has 63 characters; it is 64 hexadecimal"),
        (f"lighthouse://{PIN[:-1]}g.{TOKEN}@h", "the pin of the join string"),
        (f"lighthouse://{PIN}@h", "the join string has no token after its pin"),
        (f"lighthouse://{PIN}.@h", "the join string has no token after its pin"),
        (f"lighthouse://{PIN}.{TOKEN}!@h", "the token of the join string has"),
        (f"lighthouse://{PIN}.{TOKEN}@a b", "'a b' is not an address"),
        (f"lighthouse://{PIN}.{TOKEN}@a:0", "port 0 is not a port to connect to"),
        (f"lighthouse://{PIN}.{TOKEN}@", "'' is not an address"),
        ("a:1,,b:2", "'' is not an address"),
        (",".join(["a"] * 17), "has 17 addresses; at most 16"),
        ("x" * 20_000, "has 20000 characters"),
    ],
)
def test_a_refusal_names_the_field_and_the_remedy_and_not_the_token(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_coordinator(text, "--lighthouse")
    assert str(e.value).startswith("--lighthouse: ")
    assert words in str(e.value)
    assert TOKEN not in str(e.value)
    if "lighthouse://" in text and "address" not in words and "port" not in words:
        assert "`lighthouse token` prints" in str(e.value)


def test_an_address_may_have_to_have_its_port() -> None:
    with pytest.raises(InvalidRequest, match="'h' has no port; write host:port"):
        parse_coordinator("h", default_port=None)


def test_a_refusal_never_shows_a_token():
    text = f"lighthouse://{'a' * 64}.secret_T-oken@h:1"
    refused = InvalidRequest(f"{text!r} is not an address; write host:port", field="lighthouse")
    assert str(refused) == f"lighthouse: 'lighthouse://{'a' * 64}....@h:1' is not an address; write host:port"
    assert "secret" not in f"{refused!r} {refused.args} {DeadlinePassed(text)} {NotLeader(text, leader='h:1')}"
    assert str(Unreachable("lighthouse://10.0.0.1:1 is away")) == "lighthouse://10.0.0.1:1 is away"
