"""`lighthouse drain` and SIGTERM to a manager, as a person uses them, with groups that train."""

import json

from lighthouse_protocol.messages.membership import Participant
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.daemons.groups import training
from tests.processes import LIGHTHOUSE_CODE, LOCALHOST, Lighthouse, Manager, eventually, run_cli


def drain(lighthouse: Lighthouse, replica_id: str, *options: str) -> tuple[int, str, str]:
    ended = run_cli(LIGHTHOUSE_CODE, "drain", replica_id, "--lighthouse", lighthouse.address, *options)
    return ended.returncode, ended.stdout, ended.stderr


def members(lighthouse: Lighthouse, job: str) -> list[str]:
    with LighthouseClient(lighthouse.address) as client:
        return [member.replica_id for member in client.status(job).jobs[0].members if member.is_participant]


def test_without_a_session_it_says_what_can_be_done_instead() -> None:
    """As torchft's managers are: they are known by their calls."""
    with Lighthouse("--heartbeat-timeout", "300s") as lighthouse, LighthouseClient(lighthouse.address) as client:
        client.quorum(Participant("t", address=f"{LOCALHOST}:9", store_address=f"{LOCALHOST}:8"), timeout_s=30)
        said = "replica_id: t holds no session, so it cannot be asked; kill it instead"
        assert drain(lighthouse, "t") == (1, "", f"Error: {said}\n")


def manager_is_known(manager: Manager) -> bool:
    with ManagerClient(manager.address) as client:
        return client.status().lighthouse_reachable


def test_the_others_lose_no_step(lighthouse: Lighthouse) -> None:
    with training(lighthouse, "graceful", "abc") as (a, b, c):
        assert drain(lighthouse, "b", "--job", "graceful", "--reason", "repair", "--format", "json")[:2] == (
            0,
            json.dumps({"job": "graceful", "replica_id": "b", "reason": "repair", "draining": True}) + "\n",
        )
        b.join()
        assert (b.drained, b.manager.wait()) == ("b leaves: repair", 0)
        _, last = b.commits[-1]
        eventually(lambda: all(group.commits[-1][1] > last for group in (a, c)), "they go on without it")
        assert members(lighthouse, "graceful") == ["a", "c"]
        assert [group.discards for group in (a, b, c)] == [0, 0, 0]
    done = max(step for step, quorum_id in a.commits if quorum_id == last)
    assert b.commits[-1] == (done, last) == max(commit for commit in c.commits if commit[1] == last)


def test_asked_twice_while_it_does_its_step_it_leaves_once(lighthouse: Lighthouse) -> None:
    with training(lighthouse, "twice", "ab") as (a, b):
        a.reduce.hold()
        for _ in range(2):
            assert drain(lighthouse, "b", "--job", "twice") == (0, "replica group b of job twice is draining\n", "")
        assert b.manager.is_alive
        assert members(lighthouse, "twice") == ["a", "b"]
        a.reduce.hold(False)
        b.join()
        assert b.manager.wait() == 0
        eventually(lambda: members(lighthouse, "twice") == ["a"], "the other goes on")
        assert (a.discards, b.discards) == (0, 0)
    assert drain(lighthouse, "b", "--job", "twice")[0] == 1


def test_sigterm_drains(lighthouse: Lighthouse) -> None:
    with training(lighthouse, "sigterm", "ab") as (a, b):
        assert b.manager.stop() == 0
        b.join()
        assert b.drained == "b leaves: its manager was asked to stop"
        eventually(lambda: members(lighthouse, "sigterm") == ["a"], "the other goes on")
        assert (a.discards, b.discards) == (0, 0)


def test_a_step_that_takes_longer_than_the_drain_timeout_is_not_waited_for(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address, "a", "--job", "hung", "--drain-timeout", "300ms") as manager:
        with ManagerClient(manager.address) as rank:
            rank.quorum(0, 0, timeout_s=30)
        assert manager.stop() == 0
        assert "did not finish their step within --drain-timeout (0.3 s)" in manager.log()


def test_a_group_without_ranks_has_nothing_to_finish(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address, "idle", "--job", "idle") as manager:
        eventually(lambda: manager_is_known(manager), "its session is open")
        assert drain(lighthouse, "idle", "--job", "idle")[0] == 0
        assert manager.wait() == 0
