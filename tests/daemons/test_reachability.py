"""A manager whose host's name is a loopback at home says so, and has no place beside one that peers can reach."""

import pytest

from lighthouse_runtime.clients import LighthouseClient, ManagerClient
from protos.refusals import WrongState
from tests.processes import MANAGER_CODE, PATIENCE_S, Lighthouse, Manager, eventually

AS_ON_DEBIAN = """
import socket
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **options: resolve(
    "127.0.1.1" if host == "myhost" else host, *more, **options
)
"""


def alive(client: LighthouseClient) -> list[str]:
    return [member.replica_id for found in client.status(client.job).jobs for member in found.members]


@pytest.mark.slow
def test_a_name_that_resolves_to_a_loopback_at_home(lighthouse: Lighthouse) -> None:
    hidden = Manager(
        lighthouse.address, "h", "--job", "reach", "--advertise", "myhost", store="10.0.0.9:1",
        code=AS_ON_DEBIAN + MANAGER_CODE,
    )  # fmt: skip
    with hidden, LighthouseClient(lighthouse.address, job="reach") as client:
        eventually(lambda: alive(client) == ["h"])
        with Manager(lighthouse.address, "a", "--job", "reach", "--advertise", "10.0.0.8", store="10.0.0.8:29600"):
            eventually(lambda: alive(client) == ["a"])
            port = hidden.address.rpartition(":")[2]
            with ManagerClient(f"127.0.0.1:{port}") as rank, pytest.raises(WrongState) as refused:
                rank.quorum(0, 0, timeout_s=PATIENCE_S)
    assert f"h advertises a name that is a loopback on its own host (http://myhost:{port})" in str(refused.value)
    assert "beside a (http://10.0.0.8:" in str(refused.value)
    assert "--advertise" in str(refused.value)
