"""What an Agent raises. Anything that the next quorum can repair stays inside the step."""


class AgentError(RuntimeError):
    """This rank cannot go on; its group must be restarted. The message says why and what to do."""


class ConfigurationError(AgentError):
    """The environment, or a call, does not fit; nothing was started."""


class GroupDrained(AgentError):
    """The group was asked to leave, has done the last step that the others count on, and trains no more."""
