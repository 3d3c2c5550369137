"""install(): ours in torchft's place, before and after it was imported, and what is said where something is missing."""

import pytest

from tests.agent_client.ranks import Rank, RankError
from tests.agent_client.torchft.scripts import NATIVE_NAMES

INSTALL = "from agent_client.torchft import install; install()"
# What a script imports, and its own name for one of the classes.
IMPORTS = (
    "import torchft, torchft.local_sgd",
    "from torchft.coordination import LighthouseServer as Coordinator",
)
HOLDERS = {
    "torchft.manager.ManagerClient",
    "torchft.manager.ManagerServer",
    *(f"torchft.coordination.{name}" for name in NATIVE_NAMES if name not in ("QuorumResult", "Timestamp")),
    "__main__.Coordinator",
}


def test_before_torchft_is_imported(script: Rank) -> None:
    """torchft's binary is never loaded."""
    script.call("run", INSTALL, *IMPORTS)
    holders = script.call("holders")
    assert holders.keys() == HOLDERS | {f"torchft._torchft.{name}" for name in NATIVE_NAMES}
    assert set(holders.values()) == {"agent_client"}


def test_after_torchft_was_imported(script: Rank) -> None:
    """Also in the script's own namespace, under a name of its choice."""
    script.call("run", *IMPORTS)
    before = script.call("holders")
    assert before.keys() >= HOLDERS
    assert set(before.values()) == {"builtins"}
    script.call("run", INSTALL)
    after = script.call("holders")
    assert after.keys() >= HOLDERS
    assert set(after.values()) == {"agent_client"}


def test_twice_is_once(script: Rank) -> None:
    script.call("run", INSTALL, "import sys; first = sys.modules['torchft._torchft']", INSTALL)
    assert script.call("value", "sys.modules['torchft._torchft'] is first")


@pytest.mark.parametrize("imports", [(), IMPORTS], ids=["before", "after"])
def test_the_module_is_reached_as_an_attribute_too(script: Rank, imports: tuple[str, ...]) -> None:
    script.call("run", *imports, INSTALL, "import torchft._torchft")
    assert script.call("value", "torchft._torchft.ManagerClient.__module__") == "agent_client.torchft.clients"


@pytest.mark.parametrize("missing", ["torchft", "torch", "opentelemetry"])
def test_what_is_missing_is_said(script: Rank, missing: str) -> None:
    """A script may catch it and go on: nothing of ours is left in torchft's place."""
    script.call("run", "import sys", f"sys.modules[{missing!r}] = None")
    with pytest.raises(RankError, match=f"^ModuleNotFoundError: torchft cannot be imported: .*{missing}") as raised:
        script.call("run", INSTALL)
    assert "pip install torchft" in str(raised.value)
    assert not script.call("value", "'torchft._torchft' in sys.modules")
