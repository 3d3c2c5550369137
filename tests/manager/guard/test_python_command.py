"""Where a Python command's script or module begins; and the option that asks for it."""

import click
import pytest
from click.testing import CliRunner

from lighthouse_runtime.cli.settings import from_options, options
from manager.cli import main
from manager.guard.rules import NoPython, PythonCommand, read_python
from manager.server.config import ENV_PREFIX
from manager.supervisor.config import SupervisorConfig


@pytest.mark.parametrize(
    ("command", "interpreter", "program"),
    [
        ("python train.py", "python", "train.py"),
        ("/venv/bin/python3.11 -u train.py -m x --lr 1", "/venv/bin/python3.11 -u", "train.py -m x --lr 1"),
        ("python3 -m pkg.train -u", "python3", "-m pkg.train -u"),
        ("python3 -um pkg.train", "python3 -u", "-m pkg.train"),
        ("python3 -Bumpkg x", "python3 -Bu", "-m pkg x"),
        ("python -X dev -Wignore -W error -OO -m a", "python -X dev -Wignore -W error -OO", "-m a"),
        ("python -Xdev ./-m", "python -Xdev", "./-m"),
    ],
)
def test_the_cut(command: str, interpreter: str, program: str) -> None:
    assert read_python(command.split()) == PythonCommand(tuple(interpreter.split()), tuple(program.split()))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("bash train.sh", "bash is not a Python interpreter"),
        ("/opt/pythonic train.py", "is not a Python interpreter"),
        ("python", "neither a script nor -m"),
        ("python -u", "neither a script nor -m"),
        ("python -", "neither a script nor -m"),
        ("python -c pass", "-c is not possible"),
        ("python -ic pass", "-ic is not possible"),
        ("python --version", "--version is not possible"),
        ("python -m", "-m lacks its value"),
        ("python -uX", "-uX lacks its value"),
    ],
)
def test_what_is_none(command: str, why: str) -> None:
    with pytest.raises(NoPython, match=why):
        read_python(command.split())


@pytest.mark.parametrize(
    ("words", "env", "preload"),
    [
        ((), None, ()),
        (("--preload", "torch, sklearn.datasets", "--preload", "json"), None, ("torch", "sklearn.datasets", "json")),
        ((), "torch,json", ("torch", "json")),
        (("--preload", "os"), "torch,json", ("os",)),
    ],
)
def test_the_option_and_its_variable(words: tuple[str, ...], env: str | None, preload: tuple[str, ...]) -> None:
    found: list[SupervisorConfig] = []

    @click.command()
    @options(SupervisorConfig, ENV_PREFIX)
    def command(**values: object) -> None:
        found.append(from_options(SupervisorConfig, values))

    result = CliRunner().invoke(command, words, env={f"{ENV_PREFIX}_PRELOAD": env}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert found[0].preload == preload


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", "--preload is for python SCRIPT and python -m MODULE: true is not a Python interpreter"),
        ("torchrun train.py", "--preload: torchrun starts the ranks"),
        ("python9.99 train.py", "--preload: python9.99 was not found"),
    ],
)
def test_another_command_is_refused_before_anything_starts(command: str, why: str) -> None:
    words = ["run", "--lighthouse", "localhost", "--replica-id", "a", "--preload", "json", "--", *command.split()]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
