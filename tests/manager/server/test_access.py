"""Who acts for a group at its manager, with and without a secret, from this host and from others."""

import pytest

from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, TOKEN_METADATA_KEY, TOKEN_SCHEME
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import POLICY, check
from lighthouse_runtime.security.access import Caller
from manager.server.service import GroupAccess, secret_from

SECRET, OTHER = "the_secret_of_this_group_0123456789", "the_secret_of_another_group_0123456789"
HERE, ELSEWHERE = "ipv4:127.0.0.1:4711", "ipv4:203.0.113.7:4711"
PLACES = pytest.mark.parametrize("peer", [HERE, ELSEWHERE])
ACTS = ("Quorum", "ShouldCommit", "Watch", "Report", "Node", "Kill")
PATHS = [path for path in POLICY if path.startswith(("/manager.v1.", "/ManagerService", "/torchft.Manager"))]


def caller(peer: str, token: str = "") -> Caller:
    return Caller(peer, {TOKEN_METADATA_KEY: TOKEN_SCHEME + token} if token else {})


def allowed(access: GroupAccess, who: Caller) -> set[str]:
    """The methods that it may call, by their last names."""
    may: set[str] = set()
    for path in PATHS:
        try:
            check(path, access.principal(who))
        except NotPermitted:
            continue
        may.add(path.rpartition("/")[2])
    return may


@PLACES
def test_one_that_shows_the_secret_acts_for_the_group(peer: str):
    assert allowed(GroupAccess(SECRET), caller(peer, SECRET)) == {path.rpartition("/")[2] for path in PATHS}


@PLACES
@pytest.mark.parametrize("token", [OTHER, SECRET[:-1], SECRET + "x", SECRET.upper()])
def test_another_groups_secret_is_refused_with_the_variable_that_is_wrong(peer: str, token: str):
    with pytest.raises(NotPermitted, match=MANAGER_SECRET_VARIABLE) as refused:
        GroupAccess(SECRET).principal(caller(peer, token))
    assert SECRET not in str(refused.value)


def test_without_it_this_host_may_look_and_others_ask_what_peers_ask():
    here, elsewhere = (allowed(GroupAccess(SECRET), caller(peer)) for peer in (HERE, ELSEWHERE))
    assert elsewhere == {"CheckpointAddress", "CheckpointMetadata"}
    assert here == {*elsewhere, "Status"}


@PLACES
@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_names_the_groups_secret_and_not_the_lighthouses_token(peer: str, path: str):
    access = GroupAccess(SECRET)
    if path.rpartition("/")[2] in allowed(access, caller(peer)):
        return
    with pytest.raises(NotPermitted, match=f"set {MANAGER_SECRET_VARIABLE} to the secret of this") as refused:
        check(path, access.principal(caller(peer)))
    assert "lighthouse token" not in str(refused.value)


def test_a_group_without_a_secret_is_that_of_the_callers_of_its_host():
    """torchft's clients, and those of the documented service, show none."""
    assert allowed(GroupAccess(""), caller(HERE)) >= set(ACTS)
    assert allowed(GroupAccess(""), caller(ELSEWHERE)) == {"CheckpointAddress", "CheckpointMetadata"}


def test_a_weak_secret_is_refused_and_not_shown():
    assert secret_from({}) == secret_from({MANAGER_SECRET_VARIABLE: ""}) == ""
    assert secret_from({MANAGER_SECRET_VARIABLE: SECRET}) == SECRET
    for weak in ("short", "x" * 31, "x" * 129, "spaces are no characters of a secret "):
        with pytest.raises(InvalidRequest, match=f"{MANAGER_SECRET_VARIABLE}.*openssl rand -hex 32") as refused:
            secret_from({MANAGER_SECRET_VARIABLE: weak})
        assert weak not in str(refused.value)
