"""All ranks compare a value that must be the same at all of them."""

from collections.abc import Callable, Mapping

from agent_client.agent.rank_round import RankRounds
from agent_client.errors import ConfigurationError, RankMismatch
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.rules.rank_text import list_names

MAX_VALUE_CHARS = 1000


def check_equal(
    rounds: RankRounds, what: str, value: object, within_s: float, wait_first_quorum: Callable[[], None]
) -> None:
    """As Agent.check_equal. `wait_first_quorum` returns when the first quorum is known."""
    text = f"{what} = {value!r}"
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigurationError(f"check_equal: {what} has {len(text)} characters; compare a hash of it")
    wait_first_quorum()
    opened = rounds.open(what, within_s, may_begin=True)
    check_same(opened.named(opened.gather(text.encode(), "check_equal")))


def check_same(texts: Mapping[RankName, str]) -> None:
    """Raises RankMismatch, which lists the fewest ranks first."""
    parties: dict[str, list[RankName]] = {}
    for name, text in texts.items():
        parties.setdefault(text, []).append(name)
    if len(parties) > 1:
        by_size = sorted(parties.items(), key=lambda party: len(party[1]))
        raise RankMismatch("ranks differ: " + "; ".join(f"{text} at {list_names(names)}" for text, names in by_size))
