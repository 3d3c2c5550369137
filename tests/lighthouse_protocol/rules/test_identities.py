"""Which certificate is whose: the first line that fits decides, and a file that does not fit names its line."""

import pytest

from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Principal, Role, check_bounds, check_bounds_on_run, parse_identities

FILE = """
"spiffe://example.org/operators/*" = { role = "operate" }
"spiffe://example.org/train/{job}/{replica_id}" = { role = "join" }
"spiffe://example.org/train/*/*" = { role = "view" }
"*.Workers.example.org" = { role = "join", job = "llm" }
"*" = { role = "view" }
"""


def of(name: str, role: Role, job: str = "", replica_id: str = "") -> Principal:
    return Principal(f"certificate {name}", frozenset({role}), job, replica_id)


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        (("spiffe://example.org/operators/eve",), of("spiffe://example.org/operators/eve", Role.OPERATE)),
        (("spiffe://example.org/train/llm/a",), of("spiffe://example.org/train/llm/a", Role.JOIN, "llm", "a")),
        (("A.workers.EXAMPLE.org",), of("a.workers.example.org", Role.JOIN, "llm")),
        (("localhost",), of("localhost", Role.VIEW)),
        (("localhost", "a.workers.example.org"), of("a.workers.example.org", Role.JOIN, "llm")),
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
        ('a.b = { role = "join" }', "set the name in quotation marks"),
        ('"a" = { role = "root" }', "has role 'root'; there are join, view, operate"),
        ('"a" = { role = "join", group = "b" }', "has 'group'; there are role, job and replica_id"),
        ('"a" = { role = "join", job = "b c" }', "'b c' has ' '"),
        ('"a{job}.b" = { role = "join" }', "{job} stands for one whole part"),
        ('"{job}.{job}" = { role = "join" }', "has {job} twice"),
        ('"{job}.b" = { role = "join", job = "c" }', "has its job twice"),
        ('"{role}.b" = { role = "join" }', "there are *, {job} and {replica_id}"),
        ('"http://a/b" = { role = "join" }', "is no SPIFFE id"),
    ],
)
def test_a_line_that_does_not_fit_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_identities(text)
    assert str(e.value).startswith("--tls-identities: ")
    assert words in str(e.value)


def test_bounds() -> None:
    bound = of("x", Role.JOIN, "llm", "a")
    check_bounds(bound, "llm", "a")
    check_bounds(bound, "llm")
    check_bounds(of("x", Role.JOIN), "any", "any")
    with pytest.raises(NotPermitted, match="bound to job llm"):
        check_bounds(bound, "other", "a")
    with pytest.raises(NotPermitted, match="bound to replica group a"):
        check_bounds(bound, "llm", "b")
    check_bounds_on_run(of("x", Role.OPERATE, "llm"), "llm", "StopRun")
    with pytest.raises(NotPermitted, match="bound to job llm"):
        check_bounds_on_run(of("x", Role.OPERATE, "llm"), "other", "StopRun")
    with pytest.raises(NotPermitted, match="bound to replica group a, and StopRun acts on all groups of a run"):
        check_bounds_on_run(bound, "llm", "StopRun")
