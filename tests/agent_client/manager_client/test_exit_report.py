"""What a rank says before it dies of an exception."""

import os
import sys

import pytest

from agent_client.errors import AgentError, GroupDrained
from agent_client.manager_client.client import ExitReport


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that came to the hook that stood there before."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    return seen


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_an_uncaught_exception_is_told_once_and_printed_as_before(hook: list[BaseException]) -> None:
    said: list[str] = []
    ExitReport(said.append).install()
    error = ValueError("the loss is not a number")
    uncaught(error)
    uncaught(KeyError("later"))
    assert said == ["ValueError: the loss is not a number"]
    assert hook[0] is error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, []),
        (GroupDrained("a leaves"), []),
        (SystemExit(), []),
        (SystemExit(0), []),
        (SystemExit(3), ["SystemExit: 3"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt"]),
        (AgentError("too many discards"), ["AgentError: too many discards"]),
    ],
)
def test_what_ends_the_block_is_told_if_it_is_a_failure(error: BaseException | None, said: list[str]) -> None:
    heard: list[str] = []
    ExitReport(heard.append).send(error)
    assert heard == said


def test_after_the_end_nothing_is_told_and_the_hook_stands_as_before(hook: list[BaseException]) -> None:
    before = sys.excepthook
    said: list[str] = []
    words = ExitReport(said.append)
    words.install()
    words.uninstall()
    assert sys.excepthook is before
    words.send(ValueError())
    assert said == []


def test_a_hook_that_was_put_before_it_stays(hook: list[BaseException]) -> None:
    words = ExitReport(lambda reason: None)
    words.install()
    ours = sys.excepthook
    later = lambda kind, error, trace: ours(kind, error, trace)  # noqa: E731
    sys.excepthook = later
    words.uninstall()
    assert sys.excepthook is later
    uncaught(ValueError("x"))
    assert [str(error) for error in hook] == ["x"]


def test_if_telling_fails_the_error_is_printed_all_the_same(hook: list[BaseException]) -> None:
    def fail(reason: str) -> None:
        raise RuntimeError("no manager")

    ExitReport(fail).install()
    with pytest.raises(RuntimeError):
        uncaught(ValueError("x"))
    assert [str(error) for error in hook] == ["x"]


def test_a_forked_child_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    words = ExitReport(said.append)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    words.send(ValueError())
    assert said == []
