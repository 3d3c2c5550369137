"""What facts mean. The facts of a good host are changed one at a time."""

import dataclasses
import socket
import tomllib

import pytest

from lighthouse.cli import doctor
from lighthouse.cli.rules import (
    NAMED,
    Asked,
    Certificate,
    Credential,
    Facts,
    Finding,
    Level,
    ManagerSeen,
    Place,
    Trust,
    check,
    is_healthy,
)
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState, StoreKind, StoreStatus
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, Unreachable, Untrusted, WrongProtocol
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.process.commands import OLDEST_TORCH
from tests.lighthouse.statuses import job, member, status
from tests.processes import ROOT

NOW = 1_800_000_000.0
DAY_S = 86400.0
AT = "coordinator:29510"
STATUS = dataclasses.replace(
    status(job(member("a"), member("b"))), now_unix_s=NOW, store=StoreStatus(StoreKind.JOURNAL, 3)
)
SEEN = (ManagerSeen("default", "a", "http://host:1"), ManagerSeen("default", "b", "http://host:2"))
GOOD = Facts(
    now=NOW,
    places=(Place(AT, "10.0.0.1"),),
    trust=Trust.PIN,
    certificate=Certificate("the lighthouse's certificate", NOW + 80 * DAY_S),
    credential=Credential(has_token=True, role=Role.JOIN),
    asked=Asked(AT, NOW - 0.01, NOW + 0.01, STATUS),
    version="0.1.0",
    packages={"python": "3.12.0", "torch": "not installed"},
    managers=SEEN,
)


def answered(**fields: object) -> Facts:
    """By a lighthouse of that status."""
    changed: LighthouseStatus = dataclasses.replace(STATUS, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(GOOD, asked=Asked(AT, NOW - 0.01, NOW + 0.01, changed))


def refused(error: LighthouseError) -> Facts:
    return dataclasses.replace(GOOD, asked=Asked(AT, NOW, NOW, None, error), managers=())


def changed(**fields: object) -> Facts:
    return dataclasses.replace(GOOD, **fields)  # type: ignore[arg-type]


def not_good(facts: Facts) -> list[Finding]:
    return [finding for finding in check(facts) if finding.level is not Level.OK]


def test_a_good_host_has_a_line_for_each_check_and_is_healthy() -> None:
    found = check(GOOD)
    assert is_healthy(found)
    assert [(f.check, f.level.value, f.text) for f in found] == [
        ("address", "ok", "coordinator:29510 accepts connections at 10.0.0.1"),
        ("lighthouse", "ok", "version 0.1.0 at coordinator:29510 answers after 20 ms, and leads"),
        ("tls", "ok", "the lighthouse's certificate is valid for 80 more days"),
        ("tls", "ok", "the lighthouse's certificate is trusted by the pin of the join string"),
        ("token", "ok", "a token of role join is accepted; it is valid until it is rotated"),
        ("clock", "ok", "this host's clock is within 1 s of the lighthouse's"),
        ("versions", "ok", "python 3.12.0, torch not installed"),
        ("store", "ok", "the lighthouse writes to its journal, term 3"),
        ("sessions", "ok", "2 managers connected to the lighthouse, oldest heartbeat 0.4 s old"),
        ("managers", "ok", "this host reaches 2 of 2 managers"),
    ]


def test_an_address_that_takes_no_connection_fails_and_nothing_is_said_of_what_was_not_asked() -> None:
    dead = changed(places=(Place(AT, error="it is dead; start it"),), asked=None, certificate=None, managers=())
    assert [(f.check, f.level) for f in check(dead)] == [("address", Level.FAIL), ("versions", Level.OK)]
    assert not is_healthy(check(dead))


def test_an_address_that_resets_its_connections_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that arrives before the check asks for the peer's name leaves a socket without one."""
    monkeypatch.setattr(doctor, "connected", lambda *_: socket.socket())
    places = doctor.gather(parse_coordinator("127.0.0.1:1"), lambda: status(), 1.0).places
    assert [place.error for place in places] == [
        "127.0.0.1:1 is unreachable: it resets connections; is it running there?"
    ]


def test_one_address_of_several_is_a_warning_while_another_answers() -> None:
    two = changed(places=(Place("other:29510", error="it is dead; start it"), *GOOD.places))
    [found] = not_good(two)
    assert (found.check, found.level) == ("address", Level.WARN)
    assert is_healthy(check(two))
    no_answer = dataclasses.replace(two, asked=Asked(AT, NOW, NOW, None, Unreachable("gone; wait")), managers=())
    assert [f.level for f in not_good(no_answer)] == [Level.FAIL, Level.FAIL]


@pytest.mark.parametrize(
    ("refusal", "name"),
    [
        (NotPermitted("no role; run `lighthouse token`"), "token"),
        (Untrusted("another CA; run `lighthouse token`"), "tls"),
        (WrongProtocol("an HTTP port; use the gRPC port"), "lighthouse"),
    ],
)
def test_a_refusal_fails_where_it_belongs_with_its_own_remedy(refusal: LighthouseError, name: str) -> None:
    assert not_good(refused(refusal)) == [Finding(name, Level.FAIL, str(refusal))]
    assert {f.check for f in check(refused(refusal))}.isdisjoint({"clock", "store", "sessions", "managers"})


@pytest.mark.parametrize(
    ("left_days", "level"), [(30, Level.OK), (15, Level.OK), (13, Level.WARN), (0.5, Level.WARN), (-2, Level.FAIL)]
)
@pytest.mark.parametrize(("trust", "remedy"), [(Trust.PIN, "restart it"), (Trust.CA, "renew its --tls-cert")])
def test_a_certificate_is_judged_by_the_days_left(left_days: float, level: Level, trust: Trust, remedy: str) -> None:
    found = check(changed(trust=trust, certificate=Certificate("the certificate", NOW + left_days * DAY_S)))
    [certificate] = [f for f in found if f.text.startswith("the certificate ")]
    assert (certificate.check, certificate.level) == ("tls", level)
    assert (remedy in certificate.text) is (level is not Level.OK)


def test_a_certificate_that_cannot_be_read_fails_with_the_reason() -> None:
    [found] = not_good(changed(certificate=Certificate("the certificate", error="bad PEM")))
    assert (found.level, found.text) == (Level.FAIL, "the certificate cannot be read: bad PEM")


def test_the_certificate_of_this_host_is_judged_too() -> None:
    shown = Credential(certificate=Certificate("this host's certificate c.pem", NOW + DAY_S))
    [found] = not_good(changed(credential=shown))
    assert (found.check, found.level) == ("token", Level.WARN)
    assert found.text.endswith("valid for 1 more days: renew it, or name another by --client-cert")


def test_without_tls_a_lighthouse_that_others_reach_is_a_warning() -> None:
    open_ = dataclasses.replace(answered(insecure=True), trust=Trust.NONE, certificate=None)
    [found] = not_good(open_)
    assert (found.check, found.level) == ("tls", Level.WARN)
    assert "--insecure" in found.text
    assert not_good(dataclasses.replace(answered(), trust=Trust.NONE, certificate=None)) == []


@pytest.mark.parametrize(
    ("credential", "words"),
    [
        (Credential(), "none used"),
        (Credential(has_token=True), "a token without a role is accepted"),
        (Credential(has_token=True, role=Role.VIEW), "a token of role view is accepted"),
    ],
)
def test_the_token_is_named_by_its_role(credential: Credential, words: str) -> None:
    [found] = [f for f in check(changed(credential=credential)) if f.check == "token"]
    assert (found.level, words in found.text) == (Level.OK, True)


@pytest.mark.parametrize(
    ("ahead_s", "which"),
    [(0.0, None), (0.9, None), (-0.9, None), (61.0, "behind"), (-61.0, "ahead of"), (3 * DAY_S, "behind")],
)
def test_a_clock_that_differs_is_a_warning(ahead_s: float, which: str | None) -> None:
    found = not_good(answered(now_unix_s=NOW + ahead_s))
    assert [(f.check, f.level) for f in found] == ([("clock", Level.WARN)] if which else [])
    assert which is None or f"{abs(ahead_s) - 0.01:.1f} s {which} the lighthouse's" in found[0].text


def test_an_answer_that_took_long_does_not_make_a_clock_wrong() -> None:
    slow = changed(asked=Asked(AT, NOW - 5.0, NOW + 5.0, dataclasses.replace(STATUS, now_unix_s=NOW - 4.0)))
    assert not_good(slow) == []


def test_two_versions_are_a_warning() -> None:
    [found] = not_good(answered(version="0.2.0"))
    assert (found.check, found.level) == ("versions", Level.WARN)
    assert "version 0.2.0, this host 0.1.0" in found.text


@pytest.mark.parametrize(
    ("torch", "level"),
    [
        ("2.7.1", Level.FAIL),
        ("2.8.0", Level.OK),
        ("2.13.0+cpu", Level.OK),
        ("3.0.0a0", Level.OK),
        ("1.13", Level.FAIL),
        ("not installed", Level.OK),
    ],
)
def test_a_torch_that_cannot_train_fails(torch: str, level: Level) -> None:
    given = changed(packages={"torch": torch}, oldest_torch="2.8")
    assert [found.level for found in check(given) if found.check == "versions"] == [level]


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["optional-dependencies"]["torch"]


@pytest.mark.parametrize(
    ("store", "level", "words"),
    [
        (StoreStatus(StoreKind.ETCD, 7), Level.OK, "etcd, term 7"),
        (StoreStatus(StoreKind.ETCD, 7, "timed out"), Level.FAIL, "etcd does not answer: timed out"),
        (StoreStatus(), Level.WARN, "--journal FILE"),
    ],
)
def test_the_store_is_as_the_lighthouse_says(store: StoreStatus, level: Level, words: str) -> None:
    [found] = [f for f in check(answered(store=store)) if f.check == "store"]
    assert (found.level, words in found.text) == (level, True)


def test_a_manager_that_the_lighthouse_does_not_hear_is_a_warning() -> None:
    lost = member("b", MemberState.EXPIRED, heartbeat_age_s=63.0)
    facts = answered(jobs=(job(member("a"), lost),))
    [found] = not_good(facts)
    assert (found.check, found.level) == ("sessions", Level.WARN)
    assert "1 manager connected to the lighthouse, oldest heartbeat 0.4 s old" in [each.text for each in check(facts)]
    assert "no heartbeat from b of job default at http://host:29512 for 63 s" in found.text


def test_no_manager_at_all_is_no_fault() -> None:
    assert not_good(dataclasses.replace(answered(jobs=()), managers=())) == []


def test_a_manager_that_this_host_does_not_reach_fails_and_is_named() -> None:
    [found] = not_good(changed(managers=(dataclasses.replace(SEEN[0], error="host:1 is unreachable"), SEEN[1])))
    assert (found.check, found.level) == ("managers", Level.FAIL)
    assert found.text.startswith("a of job default: host:1 is unreachable; the lighthouse receives its heartbeats")


def test_a_manager_that_does_not_reach_the_lighthouse_fails_in_its_own_words() -> None:
    [found] = not_good(changed(managers=(dataclasses.replace(SEEN[0], lighthouse_error="refused"), SEEN[1])))
    assert found.text == "a of job default at http://host:1 does not reach the lighthouse: refused"


def test_many_managers_are_counted_and_not_all_named() -> None:
    many = tuple(ManagerSeen("default", f"g{n}", "http://host:1", error="gone") for n in range(NAMED + 5))
    found = not_good(changed(managers=many))
    assert len(found) == NAMED + 1
    assert found[-1].text == "so do 5 others; `lighthouse members` lists them"
