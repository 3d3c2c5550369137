"""One round of evidence: who is asked, what has come, who is named as missing."""

import pytest

from lighthouse.job import incidents
from lighthouse.job.incidents import MAX_ASKED, EvidenceRound, Question, check_ranks, read_ranks
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from tests.lighthouse.evidence import rank

HERE = {"a": 1, "b": 2}


def names(gathering: EvidenceRound) -> list[str]:
    return [one.name for one in gathering.gathered().evidence]


def test_all_have_answered():
    gathering = EvidenceRound(HERE)
    assert gathering.questions == (Question(1, "a"), Question(2, "b"))
    gathering.add_rank(2, rank(1))
    gathering.add_rank(2, rank(0))
    gathering.finish_session(2)
    assert not gathering.is_complete
    gathering.add_rank(2, rank(2))  # it has said that it is done
    gathering.add_rank(1, rank(0))
    gathering.finish_session(1)
    assert gathering.is_complete
    assert names(gathering) == ["a/0", "b/0", "b/1"]
    assert gathering.gathered().missing == ()


def test_who_cannot_be_asked_or_does_not_answer_is_named():
    gathering = EvidenceRound({**HERE, "c": None, "slow": 5})
    gathering.add_rank(5, rank(0))
    gathering.finish_session(1)
    gathering.drop_session(2)
    assert gathering.gathered().missing == (
        "c: it holds no session with the lighthouse",
        "b: its session has ended",
        "slow: no full answer within 10 s",
    )
    assert names(gathering) == ["slow/0"], "what has come is kept"


def test_some_ranks_only():
    gathering = EvidenceRound(HERE, ranks={"b": (1, 3), "gone": ()})
    assert gathering.questions == (Question(2, "b", (1, 3)),)
    assert gathering.gathered().missing[0] == "gone: it holds no session with the lighthouse"


def test_of_many_groups_the_suspects_are_asked():
    many = {f"g{number:03}": number + 1 for number in range(MAX_ASKED + 20)}
    gathering = EvidenceRound(many, suspects=["g080/3", "g083/0"])
    asked = [question.replica_id for question in gathering.questions]
    assert (len(asked), asked[:3]) == (MAX_ASKED, ["g080", "g083", "g000"])
    [missing] = [text for text in gathering.gathered().missing if "at most" in text]
    assert missing.startswith("g062, g063, ")
    assert missing.endswith(f" and 4 more: at most {MAX_ASKED} replica groups are asked")


def test_the_text_that_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(incidents, "MAX_EVIDENCE_BYTES", 1000)
    gathering = EvidenceRound(HERE)
    gathering.add_rank(1, rank(0, stacks="x" * 600))
    gathering.add_rank(1, rank(1, stacks="x" * 600))
    first, second = gathering.gathered().evidence
    assert len(first.rank.stacks) == 600
    assert (second.rank.stacks, second.rank.output, len(second.rank.missing)) == ("", (), 1)


def test_ranks_as_typed():
    assert read_ranks([]) is None
    assert read_ranks(["b/1", "a", "b/0", "x/y/2"]) == {"b": (0, 1), "a": (), "x/y": (2,)}
    assert read_ranks(["b", "b/1"]) == {"b": ()}
    assert read_ranks(["b/1", "b"]) == {"b": ()}
    for name in ("b/", "b/x", "b/-1", "b/999999"):
        with pytest.raises(InvalidRequest, match="is not a rank; write b/1"):
            read_ranks([name])


@pytest.mark.parametrize(
    ("ranks", "size", "said"),
    [
        ((9,), 2, "rank: there is no b/9; this group has ranks b/0 to b/1"),
        ((0, 2), 2, "rank: there is no b/2; this group has ranks b/0 to b/1"),
        ((1,), 1, "rank: there is no b/1; this group has rank b/0 only"),
    ],
)
def test_a_rank_that_its_group_does_not_have_is_refused(ranks: tuple[int, ...], size: int, said: str):
    with pytest.raises(UnknownName) as e:
        check_ranks("b", ranks, size)
    assert str(e.value) == said


def test_ranks_that_may_be_there_are_taken():
    check_ranks("b", (0, 1), 2)
    check_ranks("b", (), 2)
    check_ranks("b", (7,), 0)
