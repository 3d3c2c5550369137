"""Roles and what each includes, the certificates of each principal, and secrets with their proofs."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import (
    NOBODY,
    POLICY,
    Principal,
    Role,
    check,
    check_bounds,
    check_bounds_on_run,
    digest_of,
    is_control,
    is_proven,
    is_same,
    is_shown,
    needed,
    parse_identities,
    prove,
)

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
    assert may(of(Role.OPERATE), path) == (not path.endswith("/Inject"))
    assert may(NOBODY, path) == (Role.PROBE in POLICY[path]) == may(of(Role.PROBE), path)


@given(PATHS.filter(is_control))
def test_neither_join_nor_view_acts_or_reads_output(path: str) -> None:
    assert not may(of(Role.JOIN, Role.VIEW), path)


@given(PATHS)
def test_chaos_injects_and_views_and_nothing_else(path: str) -> None:
    assert may(of(Role.CHAOS), path) == (path.endswith("/Inject") or may(of(Role.VIEW), path))


def test_who_views_does_not_join_and_who_joins_sees_no_page() -> None:
    assert not may(of(Role.VIEW), "/lighthouse.v1.LighthouseService/Session")
    assert not may(of(Role.JOIN), "GET /status")
    assert may(of(Role.JOIN), "/lighthouse.v1.LighthouseService/Status")


@pytest.mark.parametrize(
    ("principal", "path", "words"),
    [
        (NOBODY, "/lighthouse.v1.LighthouseService/Session", "Session needs a credential of role join, but the caller"),
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


FILE = """
"spiffe://example.org/operators/*" = { role = "operate" }
"spiffe://example.org/train/{job}/{replica_id}" = { role = "join" }
"spiffe://example.org/train/*/*" = { role = "view" }
"*.Workers.example.org" = { role = "join", job = "llm" }
"*" = { role = "view" }
"""


def bound_to(name: str, role: Role, job: str = "", replica_id: str = "") -> Principal:
    return Principal(f"certificate {name}", frozenset({role}), job, replica_id)


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        (("spiffe://example.org/operators/eve",), bound_to("spiffe://example.org/operators/eve", Role.OPERATE)),
        (("spiffe://example.org/train/llm/a",), bound_to("spiffe://example.org/train/llm/a", Role.JOIN, "llm", "a")),
        (("A.workers.EXAMPLE.org",), bound_to("a.workers.example.org", Role.JOIN, "llm")),
        (("localhost",), bound_to("localhost", Role.VIEW)),
        (("localhost", "a.workers.example.org"), bound_to("a.workers.example.org", Role.JOIN, "llm")),
        (("a.b.workers.example.org",), Principal("certificate a.b.workers.example.org", frozenset())),
        (("spiffe://example.org/operators/eve/more",), Principal("certificate spiffe://example.org/operators/eve/more",
                                                                 frozenset())),
        (("spiffe://example.org/operators/",), Principal("certificate spiffe://example.org/operators/", frozenset())),
        (("line\nbreak",), None),
        ((), None),
    ],
)  # fmt: skip
def test_the_first_line_that_fits_decides(names: tuple[str, ...], principal: Principal | None) -> None:
    assert parse_identities(FILE).principal(names) == principal


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no TOML", "is not TOML"),
        ('a.b = { role = "join" }', "put the name in quotation marks"),
        ('"a" = { role = "root" }', "has role 'root'; the roles are join, view, operate"),
        ('"a" = { role = "join", group = "b" }', "has 'group'; only role, job and replica_id are allowed"),
        ('"a" = { role = "join", job = "b c" }', "'b c' has ' '"),
        ('"a{job}.b" = { role = "join" }', "{job} stands for one whole part"),
        ('"{job}.{job}" = { role = "join" }', "has {job} twice"),
        ('"{job}.b" = { role = "join", job = "c" }', "has its job twice"),
        ('"{role}.b" = { role = "join" }', "the only placeholders are *, {job} and {replica_id}"),
        ('"http://a/b" = { role = "join" }', "is neither a SPIFFE id"),
    ],
)
def test_a_line_that_does_not_fit_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_identities(text)
    assert str(e.value).startswith("--tls-identities: ")
    assert words in str(e.value)


def test_bounds() -> None:
    bound = bound_to("x", Role.JOIN, "llm", "a")
    check_bounds(bound, "llm", "a")
    check_bounds(bound, "llm")
    check_bounds(bound_to("x", Role.JOIN), "any", "any")
    with pytest.raises(NotPermitted, match="bound to job llm"):
        check_bounds(bound, "other", "a")
    with pytest.raises(NotPermitted, match="bound to replica group a"):
        check_bounds(bound, "llm", "b")
    check_bounds_on_run(bound_to("x", Role.OPERATE, "llm"), "llm", "StopRun")
    with pytest.raises(NotPermitted, match="bound to job llm"):
        check_bounds_on_run(bound_to("x", Role.OPERATE, "llm"), "other", "StopRun")
    with pytest.raises(NotPermitted, match="bound to replica group a, and StopRun acts on all groups of a run"):
        check_bounds_on_run(bound, "llm", "StopRun")


SECRET, OTHER = "one secret of a group", "the secret of another"
words = st.lists(st.text(max_size=5) | st.integers(0, 99), max_size=4)


def test_a_digest_is_that_of_its_secret_alone_and_opens_nothing():
    digest = digest_of(SECRET)
    assert digest == hashlib.sha256(SECRET.encode()).hexdigest()
    assert is_shown(SECRET, digest)
    assert not is_shown(OTHER, digest)
    assert not is_shown(digest, digest)


def test_no_secret_is_like_none():
    assert digest_of("") == prove("", "for this") == ""
    assert not is_shown("", "")
    assert not is_shown("", digest_of(SECRET))
    assert not is_shown(SECRET, "")
    assert not is_same("", "")
    assert not is_proven("", "", "for this")
    assert not is_proven("", SECRET, "for this")
    assert is_same(SECRET, SECRET)
    assert not is_same("\udcff\u00e9", SECRET)


def test_a_proof_is_an_hmac_of_all_its_words():
    assert prove(SECRET, "target", 7) == hmac.new(SECRET.encode(), b"6:target1:7", hashlib.sha256).hexdigest()
    assert is_proven(prove(SECRET, "target", 7), SECRET, "target", 7)
    for wrong in (("source", 7), ("target", 8), ("target",), ("target7",), ("target", 7, "")):
        assert not is_proven(prove(SECRET, "target", 7), SECRET, *wrong)
    assert not is_proven(prove(OTHER, "target", 7), SECRET, "target", 7)


@given(words, words)
def test_other_words_have_another_proof(ours: list[str | int], theirs: list[str | int]):
    is_equal = list(map(str, ours)) == list(map(str, theirs))
    assert (prove(SECRET, *ours) == prove(SECRET, *theirs)) == is_equal
