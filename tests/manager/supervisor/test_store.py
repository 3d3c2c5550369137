"""The ports of a supervised group: of its manager and of its store."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from examples.ports import free_port
from lighthouse_protocol.refusals import InvalidRequest
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.head_host import check_ports
from manager.supervisor.local_host import Launch
from manager.supervisor.rules.plan import Torchrun


def launch(bind_port: int, torchrun: Torchrun | None = None, store: str = "auto", **settings: Any) -> Launch:
    config = ManagerConfig(lighthouse="localhost:1", replica_id="a", bind=f"[::]:{bind_port}", store=store)
    return Launch(config, SupervisorConfig(**settings), ("true",), torchrun)


def refusal(launched: Launch) -> str:
    with pytest.raises(InvalidRequest) as error:
        check_ports(launched)
    return str(error.value)


def test_free_ports_are_fine() -> None:
    check_ports(launch(free_port(""), store_port=free_port("")))


def test_the_manager_and_the_store_have_different_ports() -> None:
    assert refusal(launch(29522, master_port=29520)).startswith(
        "--bind: the manager and the group's store would both listen on 29522; "
    )
    check_ports(launch(port := free_port(""), store="coordinator:29400", store_port=port))


class TestTaken:
    @pytest.fixture
    def port(self) -> Iterator[int]:
        with socket.create_server(("", 0)) as taken:
            yield taken.getsockname()[1]

    def test_both_are_named_with_values_that_start_the_group(self, port: int) -> None:
        """A second group with the ports of the first one."""
        with socket.create_server(("", 0)) as other:
            store = other.getsockname()[1]
            said = refusal(launch(port, master_port=store - 2))
        assert said.startswith(f"--bind, --master-port: the manager cannot listen on {port}, which is in use by ")
        assert f"; the group's store cannot listen on {store}, which is in use by process {os.getpid()} (" in said
        [(bind, master)] = re.findall(r"start this one with --bind \[::\]:(\d+) --master-port (\d+)$", said)
        check_ports(launch(int(bind), master_port=int(master)))

    @pytest.mark.parametrize("torchrun", [None, Torchrun("0", 1), Torchrun("0", 1, 0)])
    def test_a_store_follows_the_master_port(self, port: int, torchrun: Torchrun | None) -> None:
        """Three groups with master ports 29500, 29501 and 29502: the first one's store has the third one's."""
        said = refusal(launch(0, torchrun, master_port=port - 2))
        assert said.startswith(f"--master-port: the group's store cannot listen on {port}, which is in use by ")
        [master] = re.findall(r"start this one with --master-port (\d+)$", said)
        check_ports(launch(0, master_port=int(master)))

    @pytest.mark.parametrize(
        ("torchrun", "option", "less"), [(None, "store_port", 0), (Torchrun("0", 1, 29500), "master_port", 2)]
    )
    def test_unless_it_has_its_own(self, port: int, torchrun: Torchrun | None, option: str, less: int) -> None:
        """torchrun's own --master-port precedes the supervisor's."""
        given: dict[str, Any] = {option: port - less}
        said = refusal(launch(0, torchrun, **given))
        [store] = re.findall(r"^--store-port: .* start this one with --store-port (\d+)$", said)
        check_ports(launch(0, store_port=int(store)))

    def test_a_store_elsewhere_needs_no_port(self, port: int) -> None:
        check_ports(launch(0, store="coordinator:29400", store_port=port))

    def test_the_manager_alone(self, port: int) -> None:
        """The first ports that it could suggest are taken, too."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("", port + 100)))
            said = refusal(launch(port, store_port=free_port("")))
            assert said.startswith(f"--bind: the manager cannot listen on {port}, which is in use by ")
            [bind] = re.findall(r"start this one with --bind \[::\]:(\d+)$", said)
            check_ports(launch(int(bind), store_port=free_port("")))
