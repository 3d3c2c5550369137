"""One file with all that is known, of a lighthouse that answers, in part, or not at all."""

import io
import json
import os
import re
import signal
import socket
import stat
import tarfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from lighthouse.cli import main
from lighthouse.cli.debug import REMOVED, Part, is_daemon, shown_words, without_secrets, write_bundle
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.process.children import command_lines
from lighthouse_runtime.security.credentials import Tokens
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import PATIENCE_S, Lighthouse, eventually


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {
            entry.name.removeprefix("lighthouse-debug/"): (tar.extractfile(entry) or io.BytesIO()).read()
            for entry in tar
        }


def bundle(out: Path, *options: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(main, ["debug", "bundle", "--out", str(out), *options], env=env)
    assert result.exit_code == 0, result.output
    return result.output


def test_all_that_a_lighthouse_knows(tmp_path: Path) -> None:
    journal, out = tmp_path / "journal.sqlite", tmp_path / "out.tar.gz"
    with Lighthouse("--journal", str(journal)) as lighthouse:
        with LighthouseClient(lighthouse.address, job="j") as client:
            quorum_id = client.quorum(Participant("a", step=3), timeout_s=PATIENCE_S).quorum_id
        said = bundle(
            out,
            *("--lighthouse", lighthouse.address, "--journal", str(journal), "--timeout", "60s"),
            env={"LIGHTHOUSE_CONTROL_TOKEN": "s3cret"},
        )
    files = contents(out)
    assert said == f"wrote {out}: 12 parts\n"
    names = ("about", "config", "incidents", "journal", "runs", "status")
    pages = ("http/livez", "http/metrics", "http/readyz", "http/log")
    assert sorted(files) == sorted([*(f"{name}.json" for name in names), *pages, "summary.txt", "doctor.txt"])
    assert b"serves gRPC on port" in files["http/log"]
    assert files["doctor.txt"].startswith(b"ok    address")
    summary = files["summary.txt"].decode()
    assert re.findall(r"^== (\w+)$", summary, re.MULTILINE) == ["status", "runs", "incidents", "doctor"]
    assert summary.startswith("== status\ntraining: step 3, 1 of 1 groups\n")
    assert [job["quorum_id"] for job in json.loads(files["status.json"])["jobs"]] == [quorum_id]
    assert b"lighthouse_up 1.0" in files["http/metrics"]
    jobs = json.loads(files["journal.json"])["jobs"]
    assert [(job["job"], job["quorum_id"]) for job in jobs] == [("j", quorum_id)]
    assert json.loads(files["journal.json"])["integrity"] == "ok"
    assert json.loads(files["config.json"])["environment"]["LIGHTHOUSE_CONTROL_TOKEN"] == REMOVED
    assert not any(b"s3cret" in body for body in files.values())
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_over_https_with_a_token_and_what_the_role_may_not_see_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    with Lighthouse(*EVERYWHERE, "--credentials", str(folder)) as lighthouse:
        secured, tokens = Secured(lighthouse, folder), Tokens.read(folder)

        def taken(role: Role) -> dict[str, bytes]:
            out, http = tmp_path / f"{role}.tar.gz", f"127.0.0.1:{lighthouse.http_port}"
            where = ("--lighthouse", secured.join_string(role), "--http", http, "--timeout", "60s")
            bundle(out, *where, "--journal", str(tmp_path / "none"))
            files = contents(out)
            assert not any(token.encode() in body for token in tokens.all() for body in files.values())
            return files

        operator, worker = taken(Role.OPERATE), taken(Role.JOIN)
    assert b"lighthouse_up 1.0" in operator["http/metrics"]
    assert operator["http/livez"] == b"ok\n"
    assert b"403" in worker["http/metrics.error.txt"]
    assert b"needs a credential of role view" in worker["http/metrics.error.txt"]
    assert worker["http/livez"] == b"ok\n"


def test_one_that_is_gone_leaves_a_file_that_says_so_for_each_part(tmp_path: Path) -> None:
    out = tmp_path / "out.tar.gz"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        said = bundle(
            out, "--lighthouse", address, "--http", address, "--journal", str(tmp_path / "none"), "--timeout", "1s"
        )
    files = contents(out)
    pages = ["http/livez", "http/readyz", "http/metrics", "http/log"]
    lost = ["status.json", "runs.json", "incidents.json", *pages, "journal.json"]
    whole = ["about.json", "config.json", "summary.txt", "doctor.txt"]
    assert sorted(files) == sorted([*whole, *(f"{name}.error.txt" for name in lost)])
    assert said == f"wrote {out}: 12 parts; missing: {', '.join(lost)} (NAME.error.txt says why)\n"
    assert address.encode() in files["status.json.error.txt"]
    assert b"refused" in files["http/metrics.error.txt"]


def test_of_several_lighthouses_the_one_that_leads_is_read(tmp_path: Path) -> None:
    journal, out = tmp_path / "journal.sqlite", tmp_path / "out.tar.gz"
    with Lighthouse("--journal", str(journal)) as lighthouse, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        addresses = f"127.0.0.1:{unused.getsockname()[1]},{lighthouse.address}"
        bundle(out, "--lighthouse", addresses, "--journal", str(journal), "--timeout", "60s")
    files = contents(out)
    assert f"gRPC on port {lighthouse.port}" in files["http/log"].decode()
    assert not [name for name in files if name.endswith(".error.txt")]


def test_without_a_journal_the_first_lighthouses_port_is_named(tmp_path: Path) -> None:
    addresses = "127.0.0.1:1,127.0.0.1:2"
    bundle(tmp_path / "b", "--lighthouse", addresses, "--timeout", "1s", env={"XDG_STATE_HOME": str(tmp_path)})
    assert b"journal-1.sqlite" in contents(tmp_path / "b")["journal.json.error.txt"]


def test_a_part_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    released = threading.Event()
    parts = [Part("hangs", lambda: str(released.wait(PATIENCE_S)).encode()), Part("there", lambda: b"x")]
    assert write_bundle(tmp_path / "b.tar.gz", parts, 0.2) == ["hangs"]
    released.set()
    assert contents(tmp_path / "b.tar.gz") == {"hangs.error.txt": b"no answer within 0.2 s\n", "there": b"x"}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--out: cannot write .*no/b\.tar\.gz: No such file"):
        write_bundle(tmp_path / "no" / "b.tar.gz", [], 1.0)


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidRequest, match=r"--out: .*/pipe is not a regular file; name another file"):
        write_bundle(pipe, [], 1.0)
    assert pipe.is_fifo()


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.touch()
    link.symlink_to(target)
    write_bundle(link, [Part("there", lambda: b"x")], PATIENCE_S)
    assert link.is_symlink()
    assert contents(target) == {"there": b"x"}


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    released = threading.Event()

    def interrupt() -> bytes:
        eventually(lambda: any(tmp_path.iterdir()), "the file is begun")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return str(released.wait(PATIENCE_S)).encode()

    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "b.tar.gz", [Part("slow", interrupt)], PATIENCE_S)
    released.set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("LIGHTHOUSE_JOIN_TOKEN", "abc", REMOVED),
        ("LIGHTHOUSE_CONTROL_TOKEN_FILE", "/etc/token", "/etc/token"),
        ("LIGHTHOUSE_MIN_REPLICAS", "2", "2"),
        ("LIGHTHOUSE_ADDRESS", "lighthouse://5f1c.t0ken@head:29510", f"lighthouse://{REMOVED}@head:29510"),
        ("LIGHTHOUSE_ADDRESS", "head:29510", "head:29510"),
        ("LIGHTHOUSE_ON_PREEMPTION", "https://hooks.example/T0/B0/s3cret", REMOVED),
        ("--on_preemption", "https://hooks.example/T0/B0/s3cret", REMOVED),
    ],
)
def test_secrets_are_removed_and_nothing_else(name: str, value: str, shown: str) -> None:
    assert without_secrets(name, value) == shown


def test_the_command_line_of_a_daemon_is_shown_without_secrets() -> None:
    line = ["/usr/bin/python3", "/opt/bin/lighthouse", "serve", "--tls-key-file", "/k", "--token=x", "--secret", "y"]
    assert is_daemon(line)
    assert shown_words(line)[3:] == ["--tls-key-file", "/k", f"--token={REMOVED}", "--secret", REMOVED]
    assert not is_daemon(["python", "/opt/bin/lighthouse-manager", "run", "--", "train.py", "--api-key", "x"])


def test_this_process_sees_its_own_command_line() -> None:
    own = Path(f"/proc/{os.getpid()}/cmdline").read_text().rstrip("\0").split("\0")
    assert own in list(command_lines())
