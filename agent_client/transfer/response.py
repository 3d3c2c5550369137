"""What a source's answer must say before a byte of its body is used."""

from http.client import HTTPResponse

from agent_client.state.decoding import CorruptState
from lighthouse_protocol.rules.proof import is_proven

_MAX_REFUSAL_BYTES = 2000
CANNOT_BE_SENT = 410
NONCE_HEADER, PROOF_HEADER = "Lighthouse-Nonce", "Lighthouse-Proof"


class StateUnavailable(Exception):
    """No source serves this state: it refused, is gone, or never was there."""


class StateRefused(StateUnavailable):
    """The source has the state, and it holds something that cannot be sent; no other attempt would help."""


def check_challenge(response: HTTPResponse) -> str:
    """The source's nonce."""
    _check_status(response, 200)
    response.read()
    return response.getheader(NONCE_HEADER, "")


def check_source(response: HTTPResponse, secret: str, *words: str | int) -> None:
    """Raises unless the answer comes from a member of the quorum, to this very request."""
    matters = response.status < 300 or response.status == CANNOT_BE_SENT
    if secret and matters and not is_proven(response.getheader(PROOF_HEADER, ""), secret, *words):
        raise StateUnavailable("it did not prove that it is a member of the quorum; its data is not used")


def is_unknown_route(response: HTTPResponse) -> bool:
    """Whether the source is of a release that knows no such request."""
    return response.status == 404


def check_answer(response: HTTPResponse, length: int | None = None) -> None:
    """Raises unless it answers, with so many bytes."""
    _check_status(response, 200)
    if length not in (None, response.length):
        raise CorruptState(f"asked for {length} bytes, the answer has {response.length}")


def check_begin(response: HTTPResponse, max_bytes: int | None) -> tuple[int, str]:
    """(the length of the state, the tag under which the rest of it can be asked for)"""
    _check_status(response, 200)
    if response.length is None:
        raise CorruptState("the answer has no valid Content-Length")
    if max_bytes is not None and response.length > max_bytes:
        raise CorruptState(f"the answer has {response.length} bytes, more than {max_bytes}")
    return response.length, response.getheader("ETag", "")


def check_rest(response: HTTPResponse, offset: int, length: int) -> None:
    """Raises unless this is the same state from byte `offset` to its end."""
    _check_status(response, 206)
    expected = f"bytes {offset}-{length - 1}/{length}"
    if (found := response.getheader("Content-Range", "")) != expected or response.length != length - offset:
        raise CorruptState(f"asked for {expected}, the answer has {found or 'no range'}, {response.length} bytes")


def _check_status(response: HTTPResponse, expected: int) -> None:
    if response.status != expected:
        is_refusal = response.status >= 400
        text = response.read(_MAX_REFUSAL_BYTES).decode(errors="replace") if is_refusal else f"not {expected}"
        if response.status == CANNOT_BE_SENT:
            raise StateRefused(f"the source cannot send its state: {text}")
        raise StateUnavailable(f"it answered {response.status}: {text}")
