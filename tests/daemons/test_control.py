"""Who may end things, seen from another host, where the lighthouse is insecure; test_secure.py has the rest."""

import pytest

from lighthouse_protocol.refusals import UnknownName
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.daemons.elsewhere import Elsewhere
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, Manager, Process

EVERYWHERE = ("--bind", "[::]:0")
OPEN = (*EVERYWHERE, "--insecure")
REMEDY = "needs a credential of role operate; "

KILL_MANAGER = "import sys; from lighthouse_runtime.client.clients import ManagerClient as C\n"
KILL_MANAGER += "C(sys.argv[1]).kill('from afar', timeout_s=10)"


def run_there(elsewhere: Elsewhere, code: str, *arguments: str) -> tuple[int, str]:
    with Process(code, arguments, prefix=elsewhere.command) as process:
        return process.wait(), process.log()


def kill_from(elsewhere: Elsewhere, lighthouse: Lighthouse, *options: str, verb: str = "kill") -> tuple[int, str]:
    where = f"{elsewhere.here}:{lighthouse.port}"
    forced = ("--force",) if verb == "kill" else ()
    return run_there(elsewhere, LIGHTHOUSE_CODE, verb, "a", "--lighthouse", where, *forced, *options)


def manager_of(lighthouse: Lighthouse, host: str, *options: str) -> Manager:
    return Manager(lighthouse.address, "a", *EVERYWHERE, "--advertise", host, *options)


def join(manager: Manager) -> None:
    with ManagerClient(manager.address) as rank:
        rank.quorum(0, 0, timeout_s=30)


def test_from_another_host_everything_but_control_is_done(elsewhere: Elsewhere) -> None:
    with Lighthouse(*OPEN) as lighthouse, manager_of(lighthouse, elsewhere.here) as manager:
        join(manager)
        for verb in ("kill", "drain"):
            status, said = kill_from(elsewhere, lighthouse, verb=verb)
            assert (status, REMEDY in said) == (1, True)
        status, said = run_there(elsewhere, KILL_MANAGER, manager.address)
        assert (status, REMEDY in said) == (1, True)
        assert manager.is_alive
        where = ("--lighthouse", f"{elsewhere.here}:{lighthouse.port}")
        for evidence in (("stacks",), ("incident", "20251122-101501")):
            status, said = run_there(elsewhere, LIGHTHOUSE_CODE, *evidence, *where)
            assert (status, REMEDY in said) == (1, True), "it shows what a job prints"
        status, said = run_there(elsewhere, LIGHTHOUSE_CODE, "members", *where, "--format", "json")
        assert (status, '"a"' in said) == (0, True)
        assert run_there(elsewhere, LIGHTHOUSE_CODE, "incidents", *where) == (0, "no incidents\n")


def test_every_loopback_is_this_host() -> None:
    with Lighthouse(*EVERYWHERE) as lighthouse:
        for host in ("127.0.0.1", "[::1]", "localhost"):
            client = LighthouseClient(f"{host}:{lighthouse.port}", role=Role.OPERATE)
            with client, pytest.raises(UnknownName):
                client.kill("z")
    with Manager("127.0.0.1:1", "a", *EVERYWHERE) as manager:
        with ManagerClient(f"[::1]:{manager.address.rpartition(':')[2]}") as client:
            client.kill("enough")
        assert manager.wait() == 1
        assert "enough" in manager.log()


def test_a_kill_of_many_lines_stays_one_line_of_the_log() -> None:
    """Who may kill may still not write log lines in the daemon's name."""
    with Manager("127.0.0.1:1") as manager:
        with ManagerClient(manager.address) as client:
            client.kill("bad disk\n2026-01-01T00:00:00Z I manager.server.daemon: all is well")
        assert manager.wait() == 1
        assert not [line for line in manager.log().splitlines() if line.startswith("2026-01-01")]
