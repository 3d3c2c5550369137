"""A certificate that is bound to a job or a replica group acts for no other one; and ranks get by with the files of
their supervisor."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.run import (
    GenerationFormed,
    RankHello,
    RankId,
    RankWelcome,
    RunTerms,
    StopAsked,
    SupervisorHello,
    SupervisorWelcome,
)
from lighthouse_protocol.messages.session import Hello
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import NotPermitted, UnknownName
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.clients import AsyncLighthouseClient, LighthouseClient
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import variables_of
from tests.daemons.groups import Group, training
from tests.daemons.mutual_tls import GROUP_A, WORKER, Site
from tests.daemons.supervisors import QUICK, Supervisor, python
from tests.processes import Manager, Process, eventually

SECRET = "a_secret_of_a_manager_in_these_tests"
JOB = "llm"
OTHER_JOB = "is bound to job llm, and may not act in job other"
OTHER_GROUP = "is bound to replica group a, and may not act as or on "
ALL_GROUPS = "is bound to replica group a, and {} acts on all groups of a run"


# -- as whom a certificate acts


def bound(site: Site, job: str = JOB, run: str = "bounds") -> AsyncLighthouseClient:
    """A client with the certificate of job llm's group a."""
    return AsyncLighthouseClient(site.at(site.pki.files(site.pki.issue("bound", GROUP_A))), job=job, run=run)


async def test_a_session_is_opened_as_its_own_group_alone(site: Site) -> None:
    async with bound(site) as client, client.session() as session:
        session.send(Hello(Participant("b", "1"), secret=SECRET))
        with pytest.raises(NotPermitted, match=OTHER_GROUP + "b"):
            await anext(session)


@pytest.mark.parametrize("name", ["b", "b/1", "ab", "a/b"])
async def test_a_supervisor_of_another_group_is_refused(site: Site, name: str) -> None:
    run = f"refused-{name}"
    async with bound(site, run=run) as client, client.supervise() as stream:
        stream.send(SupervisorHello(name, "s1", "h1", (0,), SECRET))
        with pytest.raises(NotPermitted, match=OTHER_GROUP + name):
            await anext(stream)
        assert await client.runs(run) == (), "it has left nothing behind"


@pytest.mark.parametrize("name", ["a", "a/1"])
async def test_a_supervisor_of_its_own_group_is_welcome(site: Site, name: str) -> None:
    async with bound(site, run=f"own-{name}") as client, client.supervise() as stream:
        stream.send(SupervisorHello(name, "s1", "h1", (0,), SECRET))
        assert isinstance(await anext(stream), SupervisorWelcome)


async def test_neither_a_supervisor_nor_a_rank_acts_in_another_job(site: Site) -> None:
    terms = RunTerms(world_size=1, stride=100)
    async with bound(site, "other") as client:
        async with client.supervise() as supervisor:
            supervisor.send(SupervisorHello("a", "s1", "h1", (0,), SECRET))
            with pytest.raises(NotPermitted, match=OTHER_JOB):
                await anext(supervisor)
        async with client.rank() as rank:
            rank.send(RankHello(RankId(0, "i0"), terms, is_ready=True, secret=SECRET))
            with pytest.raises(NotPermitted, match=OTHER_JOB):
                await anext(rank)
        assert await client.runs("bounds") == ()
    async with bound(site) as client, client.rank() as rank:
        rank.send(RankHello(RankId(0, "i0"), terms, is_ready=True, secret=SECRET))
        assert isinstance(await anext(rank), RankWelcome | GenerationFormed)


async def test_a_supervisor_that_is_refused_stops_no_run(site: Site) -> None:
    """What it sends behind its hello is not read."""
    run = "goes-on"
    async with bound(site, run=run) as client, client.supervise() as own:
        own.send(SupervisorHello("a", "s1", "h1", (0,), SECRET))
        assert isinstance(await anext(own), SupervisorWelcome)
        async with client.supervise() as forged:
            forged.send(SupervisorHello("b", "s2", "h2", (1,), SECRET))
            forged.send(StopAsked("for another group"))
            with pytest.raises(NotPermitted, match=OTHER_GROUP + "b"):
                await anext(forged)
        [shown] = await client.runs(run)
        assert ([each.name for each in shown.supervisors], shown.stop) == (["a"], None)


# -- on whom an operator's certificate acts


def worker(site: Site) -> dict[str, str]:
    """Bound to nothing: of managers."""
    return variables_of(site.pki.files(site.pki.issue("manager", WORKER)))


@pytest.fixture(scope="module")
def groups(site: Site) -> Iterator[tuple[Group, ...]]:
    """They train in job llm."""
    with training(site.address, JOB, "abc", step_s=0.02, env=worker(site)) as groups:
        yield groups


def operator(site: Site, bounds: str, job: str = JOB) -> LighthouseClient:
    return site.client(f"spiffe://example.org/admins/{bounds}", job=job)


def named(kind: str, job: str, replica_id: str) -> Rpc[Any]:
    """Kill or Drain that names its job in the message, as the page does, and not beside it."""
    request = getattr(lighthouse_pb2, f"Lighthouse{kind}Request")(job=job, replica_id=replica_id)
    answer = getattr(lighthouse_pb2, f"Lighthouse{kind}Response")
    return Rpc(f"/lighthouse.v1.LighthouseService/{kind}", request, answer, lambda read: read, 60.0)


@pytest.mark.parametrize("kind", ["Kill", "Drain"])
def test_kill_and_drain_of_another_group_or_job_are_refused(site: Site, groups: tuple[Group, ...], kind: str) -> None:
    before, told_before = [len(group.commits) for group in groups], len(site.audit)
    with operator(site, "llm/a") as client, pytest.raises(NotPermitted, match=OTHER_GROUP + "b"):
        client.invoke(named(kind, JOB, "b"))
    for bounds in ("other", "other/b"):
        wrong = "is bound to job other, and may not act in job llm"
        with operator(site, bounds) as client, pytest.raises(NotPermitted, match=wrong):
            client.invoke(named(kind, "", "b"))
        with operator(site, bounds, job="other") as client, pytest.raises(NotPermitted, match=wrong):
            client.invoke(named(kind, JOB, "b"))
    told = [entry for entry in site.audit[told_before:] if entry["what"] == kind]
    assert len(told) == 5
    assert all(entry["result"].startswith("refused: certificate spiffe://example.org/admins/") for entry in told)
    eventually(lambda: all(len(g.commits) > n + 3 for g, n in zip(groups, before, strict=True)), "all go on")
    assert [group.discards for group in groups] == [0, 0, 0]


def test_the_pages_kill_is_bound_as_well(site: Site, groups: tuple[Group, ...]) -> None:
    page = f"https://localhost:{site.lighthouse.http_port}"

    def kill(replica_id: str, job: str = JOB) -> tuple[int, str]:
        admin = site.pki.issue("admin", "spiffe://example.org/admins/llm/a")
        csrf = json.loads(site.get("/control", admin)[1])["csrf"]
        order = {"job": job, "replica_id": replica_id, "reason": ""}
        return site.post("/kill", order, admin, Origin=page, **{"X-CSRF-Token": csrf})

    status, body = kill("b")
    assert (status, OTHER_GROUP + "b" in body) == (403, True), body
    status, body = kill("a", "other")
    assert (status, OTHER_JOB in body) == (403, True), body
    assert all(group.manager.is_alive for group in groups)


def test_to_stop_a_run_takes_a_certificate_that_is_bound_to_no_group(site: Site) -> None:
    """A run has ranks of other groups, too."""
    for call, kind in ((rpcs.stop_run("enough"), "StopRun"), (rpcs.resume_run(), "ResumeRun")):
        with operator(site, "llm/a") as client, pytest.raises(NotPermitted, match=ALL_GROUPS.format(kind)):
            client.invoke(call)
        with operator(site, "llm", job="other") as client, pytest.raises(NotPermitted, match=OTHER_JOB):
            client.invoke(call)
        with operator(site, "llm") as client, pytest.raises(UnknownName):
            client.invoke(call)


def test_a_bound_operator_drains_and_kills_what_it_is_bound_to(site: Site) -> None:
    job = "drained"
    with training(site.address, job, "abc", step_s=0.02, env=worker(site)) as (a, b, c):
        with operator(site, f"{job}/a", job=job) as client:
            client.drain("a", "by its own operator")
        a.join()
        assert a.drained
        _kill_its_own(site)
        assert b.manager.is_alive
        at = len(c.commits)
        eventually(lambda: len(c.commits) > at + 3, "the others go on")


def _kill_its_own(site: Site) -> None:
    with Manager(site.address, "k", "--job", "killed", env=worker(site)) as manager:
        with operator(site, "killed/k", job="killed") as client:
            eventually(lambda: _is_killed(client, "k"), "it has joined, and is killed")
        assert manager.wait() == 1


def _is_killed(client: LighthouseClient, replica_id: str) -> bool:
    try:
        client.kill(replica_id)
    except UnknownName:
        return False
    return True


# -- ranks below a supervisor


RANK = """
import os
from agent_client import CallWrapper, Wrapper
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_runtime.client.clients import LighthouseClient

@Wrapper(use_global_iteration=True)
def train(call: CallWrapper) -> str:
    if call.iteration == 0 and call.rank == 1:
        raise RuntimeError("once")  # a restart in process, which the lighthouse orders
    return f"rank {call.rank} of {call.world_size} has finished iteration {call.iteration}"

os.write(1, (train() + chr(10)).encode())
"""


def supervised(site: Site, how: str, files: Any, replica_id: str, command: list[str], *more: str) -> Process:
    """Its files by option or by variable; its ranks are told nothing."""
    options = {"--tls-ca": files.ca, "--client-cert": files.cert, "--client-key": files.key}
    by_option = [part for pair in options.items() for part in pair] if how == "options" else []
    return Supervisor(
        site.address,
        *(*QUICK, "--job", JOB, "--run-id", replica_id, *by_option, *more),
        command=command,
        replica_id=replica_id,
        env=variables_of(files) if how == "variables" else {},
    )


@pytest.mark.parametrize("how", ["options", "variables"])
def test_wrapped_ranks_reach_the_lighthouse_with_the_files_of_their_supervisor(
    site: Site, how: str, tmp_path: Path
) -> None:
    """The certificate is bound to their job and group: of all ranks, the supervisor's manager, and the supervisor."""
    script, name = tmp_path / "rank.py", f"by_{how}"
    script.write_text(RANK)
    files = site.pki.files(site.pki.issue(name, f"spiffe://example.org/train/llm/{name}"))
    command = [*python("")[:1], str(script)]
    with supervised(site, how, files, name, command, "--nproc-per-node", "2") as supervisor:
        assert supervisor.wait() == 0, supervisor.log()
        log = supervisor.log()
    for rank in (0, 1):
        assert f"[{name}/{rank}] rank {rank} of 2 has finished iteration 1" in log, log
    with LighthouseClient(site.at(files), job=JOB) as client:
        [run] = client.runs(name)
        assert run.is_complete
