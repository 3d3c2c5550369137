"""Every option of every command with a wrong value: status 2, the option is named, no traceback; nothing starts."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import lighthouse.cli.serve
from lighthouse.cli import main as lighthouse_main
from lighthouse_runtime.cli import Duration, Milliseconds
from manager.cli import main as manager_main

COMMANDS: dict[str, tuple[click.Command, list[str]]] = {
    "lighthouse serve": (lighthouse_main, ["serve"]),
    "torchft_lighthouse": (lighthouse.cli.serve.main, []),
    "lighthouse status": (lighthouse_main, ["status"]),
    "lighthouse members": (lighthouse_main, ["members"]),
    "lighthouse watch": (lighthouse_main, ["watch"]),
    "lighthouse kill": (lighthouse_main, ["kill", "a"]),
    "lighthouse stacks": (lighthouse_main, ["stacks"]),
    "lighthouse incident": (lighthouse_main, ["incident", "20251122-101501"]),
    "lighthouse-manager serve": (manager_main, ["serve", "--lighthouse", "localhost", "--replica-id", "a"]),
    "lighthouse-manager run": (manager_main, ["run", "--lighthouse", "localhost", "--replica-id", "a"]),
    "lighthouse-manager status": (manager_main, ["status"]),
}

BINDS = ["localhost", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x", "a b:1", ":", "[::1", "http://"]
ADDRESSES = ["a b", "localhost:99999", "localhost:x", "localhost:", "localhost:0", ":1", "http://", "x" * 600]
NAMES = ["", "a b", "x" * 129, "ü", "a\n"]
NO_FOLDER = ["{empty}"]

# Besides what its type refuses.
TLS_FILES = ("tls-cert", "tls-key", "tls-client-ca", "tls-identities", "tls-ca", "client-cert", "client-key")
WRONG: Mapping[str, list[str]] = {
    "bind": BINDS,
    "http": BINDS,
    "allowed-replicas": ["", "x", "0", "-2", "2,,4", "2;4", "1.5"],
    "lighthouse": ADDRESSES,
    "manager": ADDRESSES,
    "head": ADDRESSES,
    "replica-id": NAMES,
    "run-id": NAMES,
    "lighthouse-manager serve job": NAMES,
    "lighthouse-manager run job": NAMES,
    "store": ["localhost", "a b:1", "localhost:99999", "localhost:0", "0.0.0.0:29500"],
    **{name: ["for-no-store.pem"] for name in ("store-ca", "store-cert", "store-key", "store-user-file")},
    **{name: ["{missing}", "{folder}"] for name in TLS_FILES},
    "torchft-listen": BINDS,
    "credentials": NO_FOLDER,
    "advertise": ["a b", "0.0.0.0", "::", "10.0.0.1:80", "x" * 600],
    "master-addr": ["a b", "0.0.0.0", "h0:29500"],
    "node-rank": ["1"],
    "log-dir": NO_FOLDER,
    "incident-dir": NO_FOLDER,
    "trace-dir": NO_FOLDER,
    "master-port": ["65534"],
    "lighthouse-manager run active-ranks": ["2"],
    "min-active-ranks": ["2"],
    "health-check": ["", "'"],
    "metadata-endpoint": ["", "169.254.169.254", "ftp://169.254.169.254", "http://"],
    "preemption": ["", "x", "auto,x", "file=", "off,aws"],
    "on-preemption": ["", "scheduler.example", "ftp://scheduler.example", "http://"],
}
# Any text is right: a reason, a name that is looked up, an interpreter that is run, an option that does nothing.
ANY_TEXT = {"rank", "reason", "run", "job", "journal", "store-python", "quorum-tick-ms"}


def options_of(command: click.Command, arguments: list[str]) -> list[click.Option]:
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), arguments[0]) or command
    return [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]


def wrong_for(kind: click.ParamType) -> list[str]:
    match kind:
        case Duration():
            return ["", "0", "0s", "-1s", "5 parsecs", "1e3", "nan", "inf"]
        case Milliseconds():
            return ["", "0", "-1", "5s", "nan", "inf"]
        case click.IntRange(min=int(least), max=most):
            return ["", "x", "1.5", str(least - 1), *([str(most + 1)] if most is not None else [])]
        case click.Choice():
            return ["", "maybe"]
        case _:
            return ["x"] if kind is click.INT else []


def cases() -> Iterator[tuple[str, str, list[str]]]:
    for name, (command, arguments) in COMMANDS.items():
        for option in options_of(command, arguments):
            plain = option.opts[-1].removeprefix("--")
            wrong = wrong_for(option.type) + WRONG.get(plain, WRONG.get(f"{name} {plain}", []))
            assert wrong or plain in ANY_TEXT, f"{name} --{plain}: which values are wrong? say so in WRONG"
            if wrong:
                yield name, "--" + plain, wrong


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "folder").mkdir()
    return {name: str(tmp_path / name) for name in ("missing", "empty", "folder", "binary")}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> int:
        raise AssertionError("the daemon was started")

    for module in ("lighthouse.cli.serve", "manager.cli.serve", "manager.cli.run"):
        monkeypatch.setattr(importlib.import_module(module), "run_daemon", started)


def run(name: str, *options: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    command, arguments = COMMANDS[name]
    last = ["--", "true"] if name == "lighthouse-manager run" else []
    result = CliRunner().invoke(command, [*arguments, *options, *last], env=env, prog_name=name.split()[0])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def complaint_about(name: str, option: str, value: str) -> str:
    """What is wrong with how `value` is refused; nothing if all is well."""
    try:
        status, output = run(name, option, value)
    except AssertionError as e:
        return str(e)
    error = output[output.find("Error:") :]
    if status != 2:
        return f"status {status}: {error}"
    return "" if option.removesuffix("-ms") in error and len(error) < 1000 else f"unclear: {error}"


@pytest.mark.parametrize(("name", "option", "values"), list(cases()), ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_value_names_the_option(name: str, option: str, values: list[str], files: dict[str, str]) -> None:
    complaints = {value: complaint_about(name, option, value.format(**files)) for value in values}
    assert {value: complaint for value, complaint in complaints.items() if complaint} == {}


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("lighthouse serve", ["--active-replicas", "1", "--min-replicas", "2"], ["--active-replicas 1", "replicas 2"]),
        ("lighthouse serve", ["--allowed-replicas", "2,4", "--min-replicas", "8"], ["--allowed-replicas", "8"]),
        (
            "lighthouse serve",
            ["--allowed-replicas", "1,4", "--min-replicas", "2", "--active-replicas", "3"],
            ["--allowed-replicas has no size", "--min-replicas 2 and at most --active-replicas 3"],
        ),
        ("lighthouse serve", ["--min-replica"], ["--min-replica"]),
        ("lighthouse serve", ["--min_replica", "3"], ["No such option", "--min-replicas"]),
        ("lighthouse serve", ["extra"], ["extra"]),
        ("lighthouse kill", ["b"], ["b"]),
        ("lighthouse-manager serve", ["--no-such-thing"], ["--no-such-thing"]),
    ],
)
def test_options_that_do_not_fit(name: str, options: list[str], named: list[str]) -> None:
    status, output = run(name, *options)
    assert status == 2
    for word in named:
        assert word in output


@pytest.mark.parametrize(
    ("name", "variable", "value", "option"),
    [
        ("lighthouse serve", "LIGHTHOUSE_MIN_REPLICAS", "x", "--min-replicas"),
        ("lighthouse-manager serve", "WORLD_SIZE", "0", "--group-world-size"),
        ("lighthouse status", "TORCHFT_LIGHTHOUSE", "a b", "--lighthouse"),
        ("lighthouse-manager status", "LIGHTHOUSE_MANAGER_ADDRESS", "a b", "--manager"),
    ],
)
def test_a_wrong_environment_variable_names_its_option(name: str, variable: str, value: str, option: str) -> None:
    status, output = run(name, env={variable: value})
    assert (status, option in output) == (2, True), output


@pytest.mark.parametrize(
    "options",
    [
        ["--bind", ":0"],
        ["--bind", "[::1]:0"],
        ["--min_replicas", "3", "--join_timeout_ms", "60000", "--quorum_tick_ms", "100", "--heartbeat_timeout_ms", "1"],
        ["--join-timeout", "1m", "--join-timeout-ms", "5"],
        ["--allowed-replicas", "2,4,8"],
        ["--allowed-replicas", "2,4,8", "--min-replicas", "4", "--active-replicas", "4"],
    ],
)
def test_right_values_start_the_daemon(options: list[str]) -> None:
    for name in ("lighthouse serve", "torchft_lighthouse"):
        with pytest.raises(AssertionError, match="the daemon was started"):
            run(name, *options)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["torchrun", "--max-restarts=3", "x.py"], "torchrun --max-restarts=3: only one of the two may restart"),
        (["torchrun", "--master-port=65534", "x.py"], "--master-port 65534 + 2 is not a port"),
        (["--master-addr", "h0", "--nproc-per-node", "2", "true"], "--master-addr is only for a supervisor of one"),
        (["--nproc-per-node", "2", "torchrun", "x.py"], "--nproc-per-node 2: torchrun starts the ranks"),
        (["torchrun", "--nproc-per-node", "gpu", "x.py"], "--group-world-size is missing"),
        (
            ["--keep-every", "1", "--group-world-size", "2", "torchrun", "--nnodes", "1:2", "x.py"],
            "--keep-every: the ranks of this host are unknown",
        ),
        (
            ["--group-world-size", "3", "--nproc-per-node", "2", "true"],
            "--group-world-size 3 is not --nnodes 1 x --nproc-per-node 2; leave it out",
        ),
        (["--nnodes", "2", "--node-rank", "1", "true"], "--head is missing"),
        (["--active-ranks", "6", "--nproc-per-node", "4", "true"], "--active-ranks 6 is more than the 4 ranks"),
        (["--tee", "true"], "--tee needs --log-dir"),
        (["--slot-offset", "2", "--run-world-size", "2", "true"], "--run-world-size 2 is too small"),
        ([], "Missing argument 'CMD...'"),
    ],
)
def test_what_a_supervisor_is_asked_must_fit_together(words: list[str], named: str) -> None:
    given = ["run", "--lighthouse", "localhost", "--replica-id", "a", *words]
    result = CliRunner().invoke(manager_main, given)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())
