"""What shows that a peer is the one that it was, or a member of the same quorum: secrets, digests and proofs.

1. A secret is random text, made by the one that is to be recognised. It is shown to one daemon, over a connection that
   it trusts, and never logged, listed in a status or written to a disk: what is kept of it is its digest.
2. A proof shows that a peer knows a secret without showing it. It names what it is for, so that it serves for nothing
   else, and whatever makes it good once (a nonce of the other side).
3. All comparisons take the same time for every wrong answer.
"""

import hashlib
import hmac

# What a proof is for: the first of its words.
ADDRESS_WORD = "address"  # a member asks where its peer serves its state; then quorum_id, group_rank
TARGET_WORD = "target"  # a member asks for a state; then what it asks for, and both sides' nonces
SOURCE_WORD = "source"  # a member answers that; then what it gives, and both sides' nonces
STORE_WORD = "store"  # members meet in a store under a name that nobody else can guess; then the name


def digest_of(secret: str) -> str:
    """What is kept of a secret; it cannot be shown in its place. Empty for no secret."""
    return hashlib.sha256(_bytes(secret)).hexdigest() if secret else ""


def short_name(incarnation: str) -> str:
    """For people, who tell one start of a process from the next by it; whoever may look learns no incarnation."""
    return digest_of(incarnation)[:8]


def is_shown(secret: str, digest: str) -> bool:
    """Whether `secret` is the one with that digest; nothing is, where there is none."""
    return bool(secret and digest) and is_same(digest_of(secret), digest)


def is_same(shown: str, secret: str) -> bool:
    """Of what is kept as it is. No secret is like none."""
    return bool(secret) and hmac.compare_digest(_bytes(shown), _bytes(secret))


def prove(secret: str, *words: str | int) -> str:
    """That the caller knows `secret`, for what `words` say: hexadecimal, 64 characters. Empty without a secret."""
    if not secret:
        return ""
    message = "".join(f"{len(word)}:{word}" for word in map(str, words))  # no two lists of words give one message
    return hmac.new(_bytes(secret), _bytes(message), hashlib.sha256).hexdigest()


def is_proven(proof: str, secret: str, *words: str | int) -> bool:
    """Whether `proof` is that of one who knows `secret`. Nothing is, where there is none."""
    return is_same(proof, prove(secret, *words))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
