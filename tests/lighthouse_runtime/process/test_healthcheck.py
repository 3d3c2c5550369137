"""The health check of the image: HTTPS, HTTP, and nothing."""

from pathlib import Path

from examples.ports import free_port
from lighthouse_runtime.process.commands import is_alive
from tests.processes import Lighthouse


def test_it_finds_out_by_itself_how_a_daemon_serves(tmp_path: Path) -> None:
    everywhere = ("--bind", "[::]:0", "--http", "[::]:0", "--credentials", str(tmp_path / "credentials"))
    with Lighthouse(*everywhere) as secure, Lighthouse() as plain:
        assert is_alive(port=secure.http_port)
        assert is_alive(port=plain.http_port)
    assert not is_alive(port=free_port())
