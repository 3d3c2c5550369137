"""Exceptions of an Agent. A fault that the next quorum can repair raises none: it only discards the step."""

import re


class AgentError(RuntimeError):
    """Raised when this rank cannot continue and its replica group must restart. The message has the remedy."""


class ConfigurationError(AgentError):
    """Raised for an environment variable, an option or a call that does not fit. Nothing was started."""


class GroupDrained(AgentError, SystemExit):
    """Raised when the group was drained or its job has ended, after the last step that the other groups count on.

    It is not a failure. It is also a SystemExit: a script that does not catch it ends with status 0.
    """


class RankMismatch(AgentError):
    """Raised when a value that must be the same at all ranks differs. The message lists the values and their ranks."""


class ScriptMismatch(AgentError):
    """Raised when this group runs a different operation from the other groups of its quorum in the same step."""


class ModelMismatch(AgentError):
    """Raised when the state of a peer does not fit this group's model or optimizer."""


class EvaluationFailed(RuntimeError):
    """Raised at the other ranks when the evaluating rank raised. Has its class and text. Training can continue."""


class EvaluationInterrupted(RuntimeError):
    """Raised when a rank was lost before all ranks had the result. Training can continue with the next step."""


_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] *")
_ADVICE = re.compile(r"\.? *This is typically caused by a remote worker .*")


def first_line(error: BaseException) -> str:
    """Return the message without gloo's source location at the start and torch's advice at the end."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (_ADVICE.sub("", _SOURCE_PLACE.sub("", line)) or line)[:300]
