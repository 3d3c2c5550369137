"""One of three replica groups is lost: until the others go on, over many runs, and what is asked of that.

A loss is over when the last of the survivors has committed a step under a quorum without the lost one.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.bars import Bar
from benchmarks.support.cluster import NAMES, STEP_S, Cluster, Event, wait_until
from benchmarks.support.daemons import OURS, OURS_BY_TLS, TORCHFT
from benchmarks.support.figures import percentile, spread, table

VICTIM = NAMES[-1]
SURVIVORS = NAMES[:-1]
GIVE_UP_S = 8.0
NAMED = {OURS: "ours", OURS_BY_TLS: "ours, TLS", TORCHFT: "torchft 0.2"}
NOISE = 0.75
HUNDRED = 100
"""Of so many runs one may take longer than a bar allows."""
HEADINGS = {"noticed_s": "noticed ms", "quorum_s": "new quorum ms", "committed_s": "next committed step ms"}


@dataclass(frozen=True, slots=True)
class Limit:
    """What a bar asks of one moment. `largest_s`: of all runs; from HUNDRED on, of 99 in a hundred."""

    moment: str
    largest_s: float
    median_s: float = math.inf


def any_moment(cluster: Cluster, name: str) -> None:
    """Of a step of STEP_S."""
    time.sleep(random.uniform(0, 2 * STEP_S))


@dataclass(frozen=True, slots=True)
class Loss:
    """A fault that takes the victim away: `prepare` returns at the moment when `strike` is to come."""

    key: str
    name: str
    strike: Callable[[Cluster, str], None]
    heartbeat_timeout_s: float
    limit: Limit
    is_on_second_host: bool = False
    prepare: Callable[[Cluster, str], None] = any_moment
    workers: int = 0
    """Processes that each rank forks, which outlive it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from the fault until the last survivor was there; infinite: not within GIVE_UP_S."""

    noticed_s: float
    quorum_s: float
    committed_s: float


def lose(loss: Loss, cluster: Cluster) -> Run:
    """The victim is to be replaced afterwards."""
    survivors = [cluster.groups[name] for name in SURVIVORS]
    loss.prepare(cluster, VICTIM)
    struck_at = time.monotonic()
    loss.strike(cluster, VICTIM)

    def first(what: str) -> float:
        found = (_first(group.since(struck_at), what) for group in survivors)
        return max((at - struck_at for at in found), default=math.inf)

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: first("commit") < math.inf, GIVE_UP_S, "the survivors go on")
    return Run(min(first("revoked"), first("quorum")), first("quorum"), first("commit"))


def _first(events: Iterable[Event], what: str) -> float:
    """When a rank was told of the loss, or came so far without the lost one."""
    found = (e.at for e in events if e.what == what and (what == "revoked" or e.size == len(SURVIVORS)))
    return next(found, math.inf)


def result(loss: Loss, product: str, runs: Sequence[Run]) -> dict[str, Any]:
    return {"fault": loss.key, "product": product, "heartbeat_timeout_s": loss.heartbeat_timeout_s, "runs": runs}


def render(
    losses: Sequence[Loss], results: Sequence[Mapping[str, Any]], moments: Sequence[str] = tuple(HEADINGS)
) -> str:
    header = ["fault (heartbeat timeout), daemons", "runs", *(HEADINGS[moment] for moment in moments)]
    return table(header, [_cells(losses, row, moments) for row in results])


def _cells(losses: Sequence[Loss], row: Mapping[str, Any], moments: Sequence[str]) -> list[str]:
    loss = next(loss for loss in losses if loss.key == row["fault"])
    name = f"{loss.name} ({loss.heartbeat_timeout_s:g} s), {NAMED[row['product']]}"
    return [name, str(len(row["runs"])), *(_moment(row["runs"], moment) for moment in moments)]


def _moment(runs: Sequence[Run], moment: str) -> str:
    values = [getattr(run, moment) for run in runs]
    return f"> {GIVE_UP_S * 1e3:.0f}" if math.inf in values else spread(values).text(0, 1e3)


def bars(losses: Sequence[Loss], results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    found: list[Bar] = []
    for loss in losses:
        for row in results:
            if row["fault"] == loss.key and row["product"] in (OURS, OURS_BY_TLS):
                found += _bars(loss, row["product"], _values(loss, row))
        found += _tls_bars(loss, {row["product"]: _values(loss, row) for row in results if row["fault"] == loss.key})
    return found


def _values(loss: Loss, row: Mapping[str, Any]) -> list[float]:
    return [getattr(run, loss.limit.moment) for run in row["runs"]]


def _tls_bars(loss: Loss, by_product: Mapping[str, Sequence[float]]) -> list[Bar]:
    """With TLS as without, within the noise: of those without, a quarter takes longer than the median with."""
    if not by_product.keys() >= {OURS, OURS_BY_TLS}:
        return []
    median, within = spread(by_product[OURS_BY_TLS]).median, percentile(by_product[OURS], NOISE)
    return [Bar(f"{loss.name}, TLS: median within the noise without", median, within, "s")]


def _bars(loss: Loss, product: str, values: Sequence[float]) -> list[Bar]:
    name = loss.name if product == OURS else f"{loss.name}, TLS"
    what = f"{name} -> {'noticed' if loss.limit.moment == 'noticed_s' else 'next committed step'}"
    which = "largest" if len(values) < HUNDRED else "99th percentile"
    largest = Bar(f"{what}, {which} of {len(values)}", percentile(values, 0.99), loss.limit.largest_s, "s")
    median = Bar(f"{what}, median", spread(values).median, loss.limit.median_s, "s")
    return [largest] if math.isinf(loss.limit.median_s) else [median, largest]
