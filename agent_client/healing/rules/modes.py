"""How a rank heals, and how it gives its state to a peer that does."""

from enum import StrEnum


class HealMode(StrEnum):
    """BLOCKING: the other groups wait in one step until this one has its state. CATCH_UP: this group trains along
    meanwhile, and they do not wait."""

    BLOCKING = "blocking"
    CATCH_UP = "catch_up"


class StateServing(StrEnum):
    """SNAPSHOT: a copy of the state is served. HOLD: the state itself, whose next write waits for its readers. AUTO: a
    snapshot if memory allows, else HOLD."""

    AUTO = "auto"
    SNAPSHOT = "snapshot"
    HOLD = "hold"


class HealTransport(StrEnum):
    """The same in every replica group."""

    HTTP = "http"
    PROCESS_GROUP = "process_group"
