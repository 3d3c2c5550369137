"""Roles: what includes what, that each method and route has an entry, and that a refusal names the remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import NotPermitted
from lighthouse_protocol.rules.access import NOBODY, POLICY, Principal, Role, check, is_control, needed

PRINCIPALS = st.builds(Principal, st.just("one"), st.frozensets(st.sampled_from(Role)))
PATHS = st.sampled_from(sorted(POLICY))


def of(*roles: Role) -> Principal:
    return Principal("one", frozenset(roles))


def may(principal: Principal, path: str) -> bool:
    try:
        check(path, principal)
    except NotPermitted:
        return False
    return True


def test_every_method_of_every_service_has_an_entry() -> None:
    described = [file.DESCRIPTOR.services_by_name.values() for file in (lighthouse_pb2, manager_pb2, torchft_pb2)]
    services = [service for services in described for service in services]
    assert len(services) == 4
    for service in services:
        for method in service.methods:
            needed(f"/{service.full_name}/{method.name}")
            if service.full_name.startswith(("lighthouse.v1.", "manager.v1.")):
                bare = f"/{service.name}/{method.name}"
                assert needed(bare) == needed(f"/{service.full_name}/{method.name}")


def test_the_table_has_no_entry_for_what_is_not_there() -> None:
    described = [file.DESCRIPTOR.services_by_name.values() for file in (lighthouse_pb2, manager_pb2, torchft_pb2)]
    there = {f"/{s.full_name}/{m.name}" for services in described for s in services for m in s.methods}
    there |= {"/" + path.rpartition(".")[2] for path in there if ".v1." in path}
    ours = {path for path in POLICY if path.startswith("/") and not path.startswith("/grpc.")}
    assert ours == there


@given(PRINCIPALS, PATHS)
def test_a_role_that_is_added_takes_nothing_away(principal: Principal, path: str) -> None:
    for role in Role:
        more = Principal("one", principal.roles | {role})
        assert may(more, path) >= may(principal, path)


@given(PATHS)
def test_operate_may_all_and_nobody_may_only_probe(path: str) -> None:
    assert may(of(Role.OPERATE), path)
    assert may(NOBODY, path) == (Role.PROBE in POLICY[path]) == may(of(Role.PROBE), path)


@given(PATHS.filter(is_control))
def test_neither_join_nor_view_acts_or_reads_output(path: str) -> None:
    assert not may(of(Role.JOIN, Role.VIEW), path)


def test_who_views_does_not_join_and_who_joins_sees_no_page() -> None:
    assert not may(of(Role.VIEW), "/lighthouse.v1.LighthouseService/Session")
    assert not may(of(Role.JOIN), "GET /status")
    assert may(of(Role.JOIN), "/lighthouse.v1.LighthouseService/Status")


@pytest.mark.parametrize(
    ("principal", "path", "words"),
    [
        (NOBODY, "/lighthouse.v1.LighthouseService/Session", "Session needs a credential of role join, and the caller"),
        (of(Role.VIEW), "/LighthouseService/Kill", "Kill needs a credential of role operate; one has role view"),
        (of(Role.JOIN), "GET /status", "GET /status needs a credential of role view; one has role join"),
    ],
)
def test_a_refusal_names_the_role_and_the_command(principal: Principal, path: str, words: str) -> None:
    with pytest.raises(NotPermitted) as e:
        check(path, principal)
    assert words in str(e.value)
    assert "`lighthouse token " in str(e.value)
    assert "--port" not in str(e.value)
    with pytest.raises(NotPermitted, match=r"`lighthouse token [a-z]+ --port 29599`"):
        check(path, principal, 29599)
    way = "--lighthouse or LIGHTHOUSE_ADDRESS" if path.startswith("/") else "sign in on the page with its output"
    assert way in str(e.value)
