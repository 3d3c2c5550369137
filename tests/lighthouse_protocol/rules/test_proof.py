"""Secrets, digests and proofs."""

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.rules.access import digest_of, is_proven, is_same, is_shown, prove

SECRET, OTHER = "one secret of a group", "the secret of another"
words = st.lists(st.text(max_size=5) | st.integers(0, 99), max_size=4)


def test_a_digest_is_that_of_its_secret_alone_and_opens_nothing():
    digest = digest_of(SECRET)
    assert digest == hashlib.sha256(SECRET.encode()).hexdigest()
    assert is_shown(SECRET, digest)
    assert not is_shown(OTHER, digest)
    assert not is_shown(digest, digest)


def test_no_secret_is_like_none():
    assert digest_of("") == prove("", "for this") == ""
    assert not is_shown("", "")
    assert not is_shown("", digest_of(SECRET))
    assert not is_shown(SECRET, "")
    assert not is_same("", "")
    assert not is_proven("", "", "for this")
    assert not is_proven("", SECRET, "for this")
    assert is_same(SECRET, SECRET)
    assert not is_same("\udcff\u00e9", SECRET)


def test_a_proof_is_an_hmac_of_all_its_words():
    assert prove(SECRET, "target", 7) == hmac.new(SECRET.encode(), b"6:target1:7", hashlib.sha256).hexdigest()
    assert is_proven(prove(SECRET, "target", 7), SECRET, "target", 7)
    for wrong in (("source", 7), ("target", 8), ("target",), ("target7",), ("target", 7, "")):
        assert not is_proven(prove(SECRET, "target", 7), SECRET, *wrong)
    assert not is_proven(prove(OTHER, "target", 7), SECRET, "target", 7)


@given(words, words)
def test_other_words_have_another_proof(ours: list[str | int], theirs: list[str | int]):
    is_equal = list(map(str, ours)) == list(map(str, theirs))
    assert (prove(SECRET, *ours) == prove(SECRET, *theirs)) == is_equal
