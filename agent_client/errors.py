"""Exceptions of an Agent. A fault that the next quorum can repair discards the step and raises no exception."""

import re


class AgentError(RuntimeError):
    """Raised when this rank cannot continue and its replica group must restart. The message says what to do."""


class ConfigurationError(AgentError):
    """Raised for an invalid environment variable, option or call, before anything is started."""


class GroupDrained(AgentError, SystemExit):
    """Raised after the group's last step, when the group was drained or its job has ended.

    This is not a failure. The exception is also a SystemExit, so a script that does not catch it exits with status 0.
    """


class RankMismatch(AgentError):
    """Raised when a value that must be the same on all ranks differs. The message lists the values by rank."""


class ScriptMismatch(AgentError):
    """Raised when this group and the other groups in its quorum run different operations in the same step."""


class ModelMismatch(AgentError):
    """Raised when the state of a peer does not match this group's model or optimizer."""


class EvaluationFailed(RuntimeError):
    """Raised on all other ranks if the evaluating rank fails, with its error as text. Training can continue."""


class EvaluationInterrupted(RuntimeError):
    """Raised when a rank is lost before all ranks have the result of an evaluation. Training can continue."""


_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] *")
_ADVICE = re.compile(r"\.? *This is typically caused by a remote worker .*")


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, without gloo's source location and torch's advice."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (_ADVICE.sub("", _SOURCE_PLACE.sub("", line)) or line)[:300]
