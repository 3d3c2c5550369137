"""What a source's answer must say before a byte of its body is used."""

from http.client import HTTPResponse

from agent_client.state.decoding import CorruptState

_MAX_REFUSAL_BYTES = 2000


class StateUnavailable(Exception):
    """No source serves this state: it refused, is gone, or never was there."""


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
        raise StateUnavailable(f"it answered {response.status}: {text}")
