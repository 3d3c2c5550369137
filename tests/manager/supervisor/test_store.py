"""The port of a group's store."""

import os
import socket

import pytest

from examples.ports import free_port
from lighthouse_protocol.refusals import InvalidRequest
from manager.supervisor.head_host import check_port


def test_a_free_port_is_fine() -> None:
    check_port(free_port(""))


def test_a_taken_one_says_who_has_it_and_what_to_do() -> None:
    """Three groups on one host with master ports 29500, 29501 and 29502: the first one's store has the third one's."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest) as error:
            check_port(port)
    said = str(error.value)
    assert said.startswith(f"--store-port: the group's store cannot listen on {port}: process {os.getpid()} (")
    assert "need master ports at least 3 apart" in said
    assert "--store HOST:PORT" in said
