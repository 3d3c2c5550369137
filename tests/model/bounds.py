"""What is explored: bounds, goals, and how a state and a trace are printed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.model.explorer import Explorer, Found, Goal, Step, Symmetry
from tests.model.protocol import NAMES, Model
from tests.model.state import NOTHING, RECALLED, World

FIELDS_OF_THE_WHOLE = 7
"""Fields of a Lighthouse that have no entry for each group."""


@dataclass(frozen=True)
class Bounds:
    """`faults` may happen in one run, by kind. `quorums` may form; the search counts states that would need more."""

    groups: int
    last_step: int
    faults: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    lighthouses: int = 1
    quorums: int = 6
    delays_writes: bool = False

    def model(self, weak: Iterable[str] = (), promises: Iterable[str] = ()) -> Model:
        return Model(
            self.groups,
            self.last_step,
            self.faults,
            lighthouses=self.lighthouses,
            quorums=self.quorums,
            delays_writes=self.delays_writes,
            weak=weak,
            promises=promises,
        )

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.items()) or "no fault"
        lighthouses = f", {self.lighthouses} lighthouses" if self.lighthouses > 1 else ""
        writes = ", late writes" if self.delays_writes else ""
        return f"{self.groups} groups{lighthouses}{writes}, {self.last_step} steps, {faults}"


def goals(bounds: Bounds) -> tuple[Goal, ...]:
    def trains(state: tuple[Any, ...]) -> bool:
        """All groups that live have done the last step together. Beyond the bound on quorums nothing is claimed."""
        live = [group for group in World(state).groups if not group.has_left]
        is_done = {(group.step, group.tag, group.is_torn) for group in live}
        is_bound = len(state[2]) >= bounds.quorums
        return is_bound or (len(is_done) == 1 and live[0].step >= bounds.last_step and not live[0].is_torn)

    def is_decided(state: tuple[Any, ...]) -> bool:
        return all(lighthouse[1] != RECALLED for lighthouse in state[1])

    return (
        Goal("L1 every live group does the last step in one quorum", trains),
        Goal("L2 a recalled quorum is resumed, formed again or revoked", is_decided),
    )


def check(bounds: Bounds, weak: Iterable[str] = (), promises: Iterable[str] = ()) -> tuple[Found, Model]:
    """`promises`: look at these alone."""
    model = bounds.model(weak, promises)
    wanted = [goal for goal in goals(bounds) if not promises or goal.name.split()[0] in promises]
    return Explorer(model, Symmetry(FIELDS_OF_THE_WHOLE), wanted).run(), model


# -- for a reader


def describe(step: Step) -> str:
    names: list[str] = []
    for kind, value in zip(step.action.of, step.args, strict=True):
        names.append({"g": NAMES[value], "l": f"lighthouse {value}", "q": f"quorum #{value}"}[kind])
    mark = "! " if step.action.fault is not None else "  "
    return f"{mark}{step.action.name}({', '.join(names)})"


def describe_state(state: tuple[Any, ...]) -> str:
    w = World(state)
    parts: list[str] = []
    for n, h in enumerate(w.lighthouses):
        quorum = "" if h.quorum == NOTHING else f" #{h.quorum}"
        joins = "".join(NAMES[g] for g, join in enumerate(h.joins) if join)
        upto = f" up to {h.upto}" if h.phase == "resumed" else ""
        parts.append(f"L{n}: {h.phase}{quorum}{upto}, joined {joins or '-'}" if h.term else f"L{n}: down")
    for g, group in enumerate(w.groups):
        work = f", {group.work[2]} in {group.work[1]} of #{group.work[0]}" if group.work else ""
        held = f" #{group.quorum} granted {group.granted}" if group.quorum != NOTHING else ""
        flags = [name for name in ("is_torn", "has_failed", "asks", "drains", "has_left") if getattr(group, name)]
        lease = "lease" if group.has_lease else "no lease"
        link = "linked" if group.link != NOTHING else "cut off"
        name, tag = f"{NAMES[g]}/{group.incarnation}", f"({group.step}, {group.tag})"
        parts.append(f"{name}: {tag} {group.mode}{held}{work}, {lease}, {link} {' '.join(flags)}")
    return "\n".join(parts)


def report(found: Found) -> str:
    """Print a counterexample: one action a line, `!` for a fault, then the last state."""
    lines = [f"{n:3}{describe(step)}" for n, (step, _) in enumerate(found.trace, 1)]
    last = describe_state(found.trace[-1][1]) if found.trace else ""
    return "\n".join([found.violation, *lines, "", last])


def _bounds(groups: int, last_step: int, **more: Any) -> Bounds:
    fields = {name: more.pop(name) for name in ("lighthouses", "quorums", "delays_writes") if name in more}
    return Bounds(groups, last_step, more, **fields)


QUICK = (
    _bounds(3, 2),
    _bounds(2, 1, kill=1),
    _bounds(2, 2, vanish=1),
    _bounds(2, 2, cut=1),
    _bounds(2, 2, stop_lighthouse=1),
    _bounds(2, 2, fail=1),
    _bounds(2, 2, miss=1),
    _bounds(2, 2, skip=2),
    _bounds(2, 3, drain=1),
    _bounds(2, 1, restart_manager=1),
)
"""One fault each."""

SLOW = (
    _bounds(2, 2, kill=1),
    _bounds(2, 2, restart_manager=1),
    _bounds(3, 2, fail=1),
    _bounds(3, 2, drain=1),
    _bounds(3, 1, stop_lighthouse=1),
    _bounds(3, 1, cut=1),
    _bounds(2, 2, stop_lighthouse=1, roll_back=1),
    _bounds(2, 2, stop_lighthouse=1, lighthouses=2, delays_writes=True),
    _bounds(2, 1, stop_lighthouse=1, fail=1, delays_writes=True),
    _bounds(2, 1, cut=1, miss=1),
    _bounds(2, 1, cut=1, drain=1),
    _bounds(2, 1, cut=1, fail=1),
    _bounds(2, 1, kill=1, fail=1),
    _bounds(2, 1, restart_manager=1, fail=1),
)
"""Two faults, or three groups."""
