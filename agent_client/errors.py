"""What an Agent raises. Anything that the next quorum can repair stays inside the step."""

import re


class AgentError(RuntimeError):
    """This rank cannot go on; its group must be restarted. The message says why and what to do."""


class ConfigurationError(AgentError):
    """The environment, or a call, does not fit; nothing was started."""


class GroupDrained(AgentError, SystemExit):
    """The group was asked to leave, or its job has ended; it has done the last step that the others count on.

    It is no failure: a script that does not catch it ends with status 0.
    """


class RankMismatch(AgentError):
    """In something that must be the same at all of them; the message names them and their values."""


class ScriptMismatch(AgentError):
    """This group does something else than the other participants of its quorum, in the same step."""


class ModelMismatch(AgentError):
    """This group's model or optimizer is not its peers': the state that it was to take over does not fit."""


class EvaluationFailed(RuntimeError):
    """What the evaluating rank has raised, told to the others: the class and the text. Training can go on."""


class EvaluationInterrupted(RuntimeError):
    """A rank was lost before all had the result. Training can go on: the next step has another quorum."""


_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] *")
_ADVICE = re.compile(r"\.? *This is typically caused by a remote worker .*")


def first_line(error: BaseException) -> str:
    """Without the place in a library's source that gloo puts in front, and the advice that torch puts behind."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (_ADVICE.sub("", _SOURCE_PLACE.sub("", line)) or line)[:300]
