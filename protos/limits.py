"""Numbers that both ends of a wire must agree on."""

from collections.abc import Sequence

LIGHTHOUSE_PORT = 29510
LIGHTHOUSE_HTTP_PORT = 29511
MANAGER_PORT = 29512

MAX_REPLICA_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_DATA_BYTES = 4096
MAX_MEMBER_BYTES = 16 * 1024  # of one participant, with all that is relayed unread
MAX_GROUP_WORLD_SIZE = 65536
MAX_QUORUM_ID = 2**62
MAX_REASON_CHARS = 1000  # of a refusal or an order; a status travels in a header, which has a limit of its own

# Of the last lines that a lost worker wrote.
MAX_OUTPUT_LINES = 32
MAX_OUTPUT_CHARS = 240

# One participant takes some 200 bytes (4.5 KiB with full `data`); a quorum of 10,000 must still fit.
MAX_REQUEST_BYTES = 256 * 1024
MAX_RESPONSE_BYTES = 64 * 1024 * 1024

JOB_METADATA_KEY = "lighthouse-job"
RUN_METADATA_KEY = "lighthouse-run"
TOKEN_METADATA_KEY = "lighthouse-control-token"
# On a status that a daemon of ours sent, as against one that gRPC made of a broken connection.
REFUSAL_METADATA_KEY = "lighthouse-refusal"
DEFAULT_JOB = "default"
DEFAULT_RUN = "default"

# What a daemon keeps in hand to answer a waiting call with its reason before the caller's own deadline ends it.
ANSWER_MARGIN_S = 0.25
ANSWER_MARGIN_SHARE = 0.1


def cut_reason(text: str) -> str:
    """Whatever a caller sent and a reason quotes, it must not break the answer."""
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."


def cut_output(lines: Sequence[str]) -> tuple[str, ...]:
    """The last of what a worker wrote, as it is kept."""
    return tuple(line[:MAX_OUTPUT_CHARS] for line in lines[-MAX_OUTPUT_LINES:])


def answer_margin_s(time_left_s: float) -> float:
    """How long before its deadline a call is answered, whatever there is to say."""
    return min(ANSWER_MARGIN_S, ANSWER_MARGIN_SHARE * time_left_s)
