"""Connections that stay open and carry nothing: a lighthouse's host that vanishes and is back, and one group's way. And
those that a load balancer, a sidecar or a firewall cuts, all at once."""

import json
import random
import time
from pathlib import Path

import pytest

from tests.daemons.groups import Group, training
from tests.deaf_proxy import DeafProxy
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli

BACK_AFTER_S = 1.5
WATCHED_S = 3.5
ENOUGH_SHARE = 0.15  # of the lease; a manager that waits for its end makes its ranks wait a fifth of it
PAUSED_S = 4.0
_DRAWN = random.Random(7)
THREE_MINUTES = tuple(_DRAWN.uniform(0.2, 3.0) for _ in range(38))  # 3 s and a connection after each
WITHIN_S = 5.0  # two and a half beats, a new connection, a change of the quorum


def longest_gap_s(groups: tuple[Group, ...], for_s: float) -> float:
    """Without a further step of some group."""
    ends_at = time.monotonic() + for_s
    seen = {group.name: (len(group.commits), time.monotonic()) for group in groups}
    longest = 0.0
    while (now := time.monotonic()) < ends_at:
        for group in groups:
            count, since = seen[group.name]
            longest = max(longest, now - since)
            if len(group.commits) > count:
                seen[group.name] = len(group.commits), now
        time.sleep(0.005)
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [10.0, 40.0])
@pytest.mark.timeout(180)
def test_a_lighthouse_whose_host_vanishes_and_is_back_costs_no_step(tmp_path: Path, lease_s: float) -> None:
    """Its old connections end nowhere; nothing says so."""
    options = ("--lease", f"{lease_s:g}s", "--journal", str(tmp_path / "journal"))
    with Lighthouse(*options) as first, DeafProxy(first.port) as proxy:
        with training(proxy.address, "default", "ab") as groups:
            discards = [group.discards for group in groups]
            quorum_id = groups[0].commits[-1][1]
            proxy.hush()
            first.kill()
            began_at = time.monotonic()
            with Lighthouse(*options) as second:
                away_s = time.monotonic() - began_at
                time.sleep(max(0.0, BACK_AFTER_S - away_s))
                proxy.forward(second.port)
                gap_s = longest_gap_s(groups, lease_s + WATCHED_S)
                assert gap_s < ENOUGH_SHARE * lease_s
                assert [group.discards for group in groups] == discards
                assert {group.commits[-1][1] for group in groups} == {quorum_id}


@pytest.mark.timeout(120)
def test_a_group_whose_connection_falls_silent_is_back_within_seconds() -> None:
    """The lighthouse takes it for lost, as its host may be gone; its manager does not wait out the lease."""
    with Lighthouse("--lease", "30s") as lighthouse, DeafProxy(lighthouse.port) as proxy:
        with training(proxy.address, "default", "abc") as groups:
            discards = sum(group.discards for group in groups)
            proxy.hush_first(1)
            assert longest_gap_s(groups, 10.0) < WITHIN_S
            assert sum(group.discards for group in groups) <= discards + len(groups)
            assert len({group.commits[-1][1] for group in groups}) == 1
            assert sum("opening a second connection" in group.manager.log() for group in groups) == 1


def incidents_of(lighthouse: Lighthouse) -> list[str]:
    said = run_cli(LIGHTHOUSE_CODE, "incidents", "--lighthouse", lighthouse.address, "--format", "json").stdout
    return [incident["text"] for incident in json.loads(said)]


def cut_for(proxy: DeafProxy, for_s: float) -> None:
    proxy.cut()
    time.sleep(for_s)
    proxy.mend()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("names", "cuts_s"),
    [("ab", (0.2, 3.0)), ("abc", (0.2, 0.2)), pytest.param("abc", THREE_MINUTES, marks=pytest.mark.slow)],
    ids=["two", "three", "three-minutes"],
)
def test_a_network_that_cuts_all_connections_costs_nothing(names: str, cuts_s: tuple[float, ...]) -> None:
    with Lighthouse() as lighthouse, DeafProxy(lighthouse.port) as proxy:
        with training(proxy.address, "default", names) as groups:
            quorum_id = groups[0].commits[-1][1]
            for cut_s in cuts_s:
                connections = proxy.connections
                cut_for(proxy, cut_s)
                eventually(lambda before=connections: proxy.connections >= before + len(names), "they are back")
                commits = [len(group.commits) for group in groups]
                time.sleep(3.0 if cuts_s is THREE_MINUTES else 0.5)
                assert all(len(g.commits) > count for g, count in zip(groups, commits, strict=True))
            assert [group.discards for group in groups] == [0] * len(names)
            assert {group.commits[-1][1] for group in groups} == {quorum_id}
            assert incidents_of(lighthouse) == []
            assert lighthouse.log().count("ended at the same moment: probably the network") == len(cuts_s)


def test_one_that_is_killed_alone_is_noticed_at_once(lighthouse: Lighthouse) -> None:
    with training(lighthouse, "killed-alone", "abc") as groups:
        *others, victim = groups
        quorum_id = others[0].commits[-1][1]
        killed_at = time.monotonic()
        victim.manager.kill()
        eventually(lambda: all(group.commits[-1][1] > quorum_id for group in others), "they train without it")
        assert time.monotonic() - killed_at < 2.0


@pytest.mark.parametrize(("options", "is_lost"), [((), True), (("--heartbeat-timeout", "20s"), False)])
def test_a_pause_that_the_heartbeat_timeout_allows_costs_no_step(options: tuple[str, ...], is_lost: bool) -> None:
    """By default a vanished host is noticed after two seconds, and so is a manager that stands still for four."""
    with Lighthouse(*options) as lighthouse, training(lighthouse, "default", "abc") as groups:
        *others, paused = groups
        discards, quorum_id = sum(group.discards for group in others), others[0].commits[-1][1]
        with paused.manager.paused():
            time.sleep(PAUSED_S)
            if is_lost:
                eventually(lambda: others[0].commits[-1][1] != quorum_id, "the others go on without it")
        counts = [len(group.commits) for group in groups]
        eventually(lambda: all(len(g.commits) > n for g, n in zip(groups, counts, strict=True)), "all go on")
        assert (others[0].commits[-1][1] != quorum_id) == is_lost
        assert (sum(group.discards for group in others) > discards) == is_lost
