"""Ids and addresses as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.identity import (
    Address,
    check_name,
    group_of_supervisor,
    parse_address,
    split_replica_id,
    supervisor_name,
)
from lighthouse_protocol.limits import MAX_ADDRESS_CHARS, MAX_REPLICA_ID_CHARS
from lighthouse_protocol.refusals import InvalidRequest
from tests.lighthouse_protocol.builders import UUID, addresses, names


class TestNames:
    @given(names | st.sampled_from(["a", "x" * MAX_REPLICA_ID_CHARS, "job/3:a@b+c=d-e_f.g"]))
    def test_usable(self, name: str):
        assert check_name(name) == name

    @pytest.mark.parametrize("name", ["", "x" * (MAX_REPLICA_ID_CHARS + 1), "a b", "a\n", "é", "a,b", "a\x00", "٣"])
    def test_unusable_names_its_field(self, name: str):
        with pytest.raises(InvalidRequest, match=r"^job: "):
            check_name(name, "job")


class TestSupervisors:
    @given(names.filter(lambda name: group_of_supervisor(name) == name), st.integers(0, 99), st.integers(1, 100))
    def test_the_name_tells_the_group(self, replica_id: str, host: int, hosts: int):
        assert group_of_supervisor(supervisor_name(replica_id, host, hosts)) == replica_id

    @pytest.mark.parametrize(
        ("name", "group"), [("a", "a"), ("a/1", "a"), ("a/b", "a/b"), ("a/b/12", "a/b"), ("a/1x", "a/1x")]
    )
    def test_the_groups_are(self, name: str, group: str):
        assert group_of_supervisor(name) == group


class TestTorchftIds:
    @pytest.mark.parametrize(
        ("wire_id", "parts"),
        [
            (f"train_ddp_0:{UUID}", ("train_ddp_0", UUID)),
            (f"a:b:{UUID}", ("a:b", UUID)),
            (f"a:{UUID.upper()}", ("a", UUID.upper())),
            ("a", ("a", "")),
            ("a:b", ("a:b", "")),
            (f":{UUID}", (f":{UUID}", "")),
            (UUID, (UUID, "")),
            (f"a:{UUID[:-1]}", (f"a:{UUID[:-1]}", "")),
            (f"a:{UUID}0", (f"a:{UUID}0", "")),
        ],
    )
    def test_are_name_and_incarnation(self, wire_id: str, parts: tuple[str, str]):
        assert split_replica_id(wire_id) == parts

    @given(names)
    def test_any_other_colon_belongs_to_the_name(self, name: str):
        assert split_replica_id(name) == (name, "")
        assert split_replica_id(f"{name}:{UUID}") == (name, UUID)


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("node-1:29512", "node-1", 29512),
            ("http://node-1:29512", "node-1", 29512),
            ("https://node-1:29512/", "node-1", 29512),
            ("node-1", "node-1", None),
            ("node_1.rack.example.", "node_1.rack.example.", None),
            ("10.0.0.1:0", "10.0.0.1", 0),
            ("[fd00::7]:80", "fd00::7", 80),
            ("[fd00::7]", "fd00::7", None),
            ("fd00::7", "fd00::7", None),
        ],
    )
    def test_parsed(self, text: str, host: str, port: int | None):
        assert parse_address(text, "address") == Address(host, port)

    @pytest.mark.parametrize(
        "text",
        [
            *("", ":80", "h:", "h:x", "h:-1", "h:65536", "h:0065536", "h:99999999999999999999", "h:²", "h:1:2"),
            *("[::1]:", "[]:1", "[::1", "[::1]80", "[::1]]:80", "a b:1", "-h:1", "h/path:1", "h:1/path", "user@h:1"),
            *("http://", "http://http://h:1", "x" * (MAX_ADDRESS_CHARS + 1)),
            *("a..b:1", "a.:1.", "x" * 64, f"a.{'x' * 64}.b"),  # the resolver would raise a UnicodeError
        ],
    )
    def test_malformed_names_its_field(self, text: str):
        with pytest.raises(InvalidRequest, match=r"^store_address: "):
            parse_address(text, "store_address")

    @given(addresses.filter(bool))
    def test_there_and_back(self, text: str):
        address = parse_address(text, "address")
        assert parse_address(str(address), "address") == address
        assert str(address) == text.removeprefix("http://")

    @given(st.text(max_size=30))
    def test_anything_is_parsed_or_refused(self, text: str):
        try:
            address = parse_address(text, "address")
        except InvalidRequest:
            return
        assert parse_address(str(address), "address") == address
        assert address.port is None or 0 <= address.port < 65536

    @pytest.mark.parametrize(
        "text",
        [
            *("127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "::1", "[::ffff:127.0.0.1]:1"),
            *("localhost", "http://localhost:1", "x.localhost:1", "LOCALHOST:1", "localhost.:1"),
        ],
    )
    def test_loopback(self, text: str):
        assert parse_address(text, "address").is_loopback

    @pytest.mark.parametrize("text", ["10.0.0.1:1", "host:1", "localhost.example:1", "notlocalhost", "[fd00::1]:1"])
    def test_neither_loopback_nor_unspecified(self, text: str):
        address = parse_address(text, "address")
        assert (address.is_loopback, address.is_unspecified) == (False, False)

    @pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "http://0.0.0.0:1", "0.0.0.0", "[::ffff:0.0.0.0]:1"])
    def test_unspecified(self, text: str):
        assert parse_address(text, "address").is_unspecified
