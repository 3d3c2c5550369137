"""Any message, drawn by hypothesis from the types of its fields; and what these types refuse."""

import math
from collections.abc import Iterator, Set
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from lighthouse_protocol import constraints
from lighthouse_protocol.constraints import EntryCount, IntRange, MaxChars, Shortened, UnknownAs, WireForm
from lighthouse_protocol.identity import check_name, split_replica_id
from lighthouse_protocol.limits import MAX_COUNT, MAX_GROUP_WORLD_SIZE, MAX_QUORUM_ID, MAX_SECONDS
from lighthouse_protocol.messages.hosts import HostHello
from lighthouse_protocol.messages.membership import Decision, Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.run import RunTerms
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse_protocol.builders import assignments, names, native_participants

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
NO_NUMBERS_OF_SECONDS = (math.nan, math.inf, -math.inf, 2 * MAX_SECONDS)
TOO_LONG = "x" * (constraints.MAX_TEXT_CHARS + 1)

GOOD: dict[Any, st.SearchStrategy[Any]] = {
    constraints.check_count: st.integers(0, MAX_COUNT),
    constraints.check_quorum_id: st.integers(0, MAX_QUORUM_ID),
    constraints.check_seconds: st.floats(1e-9, MAX_SECONDS),
    constraints.check_age: st.floats(0, MAX_SECONDS),
    constraints.check_offset: st.floats(-MAX_SECONDS, MAX_SECONDS),
    constraints.check_short: TEXTS,
    constraints.check_filled: TEXTS.filter(bool),
    constraints.check_secret: st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=32, max_size=128),
    check_name: names,
}
BAD: dict[Any, tuple[Any, ...]] = {
    constraints.check_count: (-1, MAX_COUNT + 1, 2**63 - 2),
    constraints.check_quorum_id: (-1, MAX_QUORUM_ID + 1),
    constraints.check_seconds: (0.0, -1.0, *NO_NUMBERS_OF_SECONDS),
    constraints.check_age: (-0.5, *NO_NUMBERS_OF_SECONDS),
    constraints.check_offset: NO_NUMBERS_OF_SECONDS,
    constraints.check_short: (TOO_LONG,),
    constraints.check_filled: ("", TOO_LONG),
    constraints.check_secret: ("", "x" * 31, "x" * 129, "\u00e9" * 40, "x" * 40 + "\n"),
    check_name: ("", "a b", "x" * 129),
    constraints.ranks_from_bits: (bytes(MAX_GROUP_WORLD_SIZE // 8 + 1),),
}
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**31 - 1),  # fits, whatever the width on the wire
    float: st.nothing(),  # all are checked
    str: TEXTS,
    bytes: st.binary(max_size=20),
    Set[int]: st.frozensets(st.integers(0, MAX_GROUP_WORLD_SIZE - 1), max_size=3),
}


class Field(NamedTuple):
    """`type` without constraints, and without None where it `is_optional`; of a list that of its `each`."""

    name: str
    type: Any
    constraints: tuple[Any, ...]
    is_optional: bool
    each: "Field | None"

    @property
    def is_message(self) -> bool:
        if self.each is not None or self.type in PLAIN:
            return False
        return hasattr(self.type, "__annotations__") and not issubclass(self.type, StrEnum)


def fields_of(cls: type[Any]) -> list[Field]:
    return [_field(name, hint) for name, hint in get_type_hints(cls, include_extras=True).items()]


def _field(name: str, hint: Any) -> Field:
    found: tuple[Any, ...] = ()
    is_optional = False
    while get_origin(hint) is Annotated or NoneType in get_args(hint):
        if get_origin(hint) is Annotated:
            found, hint = (*found, *hint.__metadata__), get_args(hint)[0]
        else:
            is_optional, hint = True, Union[*(each for each in get_args(hint) if each is not NoneType)]
    each = _field(name, get_args(hint)[0]) if get_origin(hint) is tuple else None
    return Field(name, hint, found, is_optional, each)


def messages(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Of that class."""
    return OF_CLASS[cls] if cls in OF_CLASS else _built(cls)


def _built(cls: type[Any], **instead: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    built = st.builds(cls, **{field.name: _values(field) for field in fields_of(cls)} | instead)
    return built.map(lambda value: value.fitted()) if hasattr(cls, "fitted") else built


def _values(field: Field) -> st.SearchStrategy[Any]:
    if get_origin(field.type) in (Union, UnionType):
        return st.one_of(map(messages, get_args(field.type)))
    if field.each is not None:
        drawn = st.lists(_values(field.each), min_size=1, max_size=3).map(tuple)
    elif field.is_message:
        drawn = messages(field.type)
    else:
        drawn = PLAIN[field.type] if field.type in PLAIN else st.sampled_from(field.type)
    for constraint in field.constraints:
        if isinstance(constraint, IntRange):
            drawn = st.integers(constraint.least, constraint.most)
        elif isinstance(constraint, Shortened):
            drawn = drawn.map(constraint.shorten)
        elif not isinstance(constraint, EntryCount | MaxChars):
            drawn = GOOD.get(_check(constraint), drawn)
    return st.none() | drawn if field.is_optional else drawn


def _check(constraint: Any) -> Any:
    return constraint.from_wire if isinstance(constraint, WireForm) else constraint


def refused(field: Field) -> Iterator[Any]:
    """On the wire, of one value."""
    for constraint in field.constraints:
        if isinstance(constraint, IntRange):
            yield from (constraint.least - 1, constraint.most + 1)
        elif isinstance(constraint, MaxChars):
            yield "x" * (constraint.most + 1)
        elif _check(constraint) in BAD:
            yield from BAD[_check(constraint)]
    is_open = any(isinstance(constraint, UnknownAs) for constraint in field.constraints)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum) and not is_open:
        yield from (0, 99, "of a newer version")


def _group_view(replica_id: str, incarnation: str, samples: list[ProgressSample], whole: GroupView) -> GroupView:
    ranks = (RankView(RankName(replica_id, rank), sample, 1.0) for rank, sample in enumerate(samples))
    return GroupView(replica_id, incarnation, tuple(ranks), whole.seconds)


_participants = native_participants.filter(lambda one: split_replica_id(one.wire_id)[1] != one.incarnation)
HAND_WRITTEN: dict[Any, st.SearchStrategy[Any]] = {
    Participant: _participants,
    Quorum: st.builds(Quorum, st.integers(0, MAX_QUORUM_ID), st.lists(_participants, max_size=3).map(tuple)),
    Decision: st.builds(Decision, st.booleans(), st.none() | assignments),
    LighthouseError: st.sampled_from([LighthouseError, *LighthouseError.__subclasses__()]).map(lambda cls: cls("why")),
}
OF_CLASS = dict(HAND_WRITTEN)
# Fields of these have to fit each other.
OF_CLASS[RunTerms] = _built(RunTerms, min_active=st.just(1), divisible_by=st.just(1))
OF_CLASS[HostHello] = _built(HostHello, node_rank=st.integers(1, 9), nnodes=st.integers(10, MAX_GROUP_WORLD_SIZE))
OF_CLASS[GroupView] = st.builds(
    _group_view, names, TEXTS, st.lists(_built(ProgressSample), min_size=1, max_size=2), _built(GroupView)
)
