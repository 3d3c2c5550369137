"""Ports, limits, timeouts and metadata keys that clients and servers must share."""

from collections.abc import Sequence

LIGHTHOUSE_PORT = 29510
LIGHTHOUSE_HTTP_PORT = 29511
MANAGER_PORT = 29512

# Default time after which a server closes the connection to an unresponsive caller. After half of it without traffic,
# the server sends a ping, and waits for the answer for the other half.
KEEPALIVE_S = 2.0

MAX_REPLICA_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_DATA_BYTES = 4096
MAX_MEMBER_BYTES = 16 * 1024  # one participant, including the fields that are relayed unread
MAX_GROUP_WORLD_SIZE = 65536
MAX_RANKS_PER_HOST = 256  # under one supervisor
MAX_COUNT = 2**53  # JSON numbers and floats are exact up to here
MAX_QUORUM_ID = 2**53
MAX_LEARNED_GENERATION = 2**48  # highest in a rank's hello; with any stride, later numbers stay below MAX_COUNT
MAX_KEEP_EVERY = 1_000_000  # steps
MAX_RESTARTS = 1000  # a run's record stores the time of each restart in the budget
MAX_SECONDS = 1e10  # limit of a duration and of a Unix time
MIN_SECRET_CHARS = 32  # 16 random bytes in hexadecimal cannot be guessed
SECRET_BYTES = 32  # length of the secrets that we generate
MAX_SECRET_CHARS = 128
MAX_REASON_CHARS = 1000  # a gRPC status travels in a header, which has a size limit

# Limits for the last output lines of a lost worker.
MAX_OUTPUT_LINES = 32
MAX_OUTPUT_CHARS = 240

# A participant takes some 200 bytes (4.5 KiB with full `data`); a quorum of 10,000 must still fit.
MAX_REQUEST_BYTES = 256 * 1024
MAX_RESPONSE_BYTES = 64 * 1024 * 1024

# A rank proves to its manager with this secret that it belongs to the group. There is no option: command lines are
# public.
MANAGER_SECRET_VARIABLE = "LIGHTHOUSE_MANAGER_SECRET"
JOB_METADATA_KEY = "lighthouse-job"
RUN_METADATA_KEY = "lighthouse-run"
TOKEN_METADATA_KEY = "authorization"
TOKEN_SCHEME = "Bearer "
# Marks a status that one of our daemons sent. gRPC itself creates a status without this key.
REFUSAL_METADATA_KEY = "lighthouse-refusal"
# The leader's address, sent with the refusal of a follower.
LEADER_METADATA_KEY = "lighthouse-leader"
DEFAULT_JOB = "default"
DEFAULT_STRIDE = 100
MASTER_PORT = 29500  # if the environment does not set MASTER_PORT
STORE_PORT_OFFSET = 2  # from MASTER_PORT to the port of the TCPStore that outlives the ranks
DEFAULT_RUN = "default"

# A daemon answers a waiting call this much before the caller's own deadline, so that the answer arrives in time.
ANSWER_MARGIN_S = 0.25
ANSWER_MARGIN_SHARE = 0.1

# The timeout of a request for a quorum is longer than the wait for stragglers. Otherwise a request could time out just
# before the quorum forms, and its group would lose a step.
JOIN_TIMEOUT_S = 60.0
QUORUM_TIMEOUT_S = JOIN_TIMEOUT_S + 30.0


def cut_reason(text: str) -> str:
    """Return `text` as one printable line of at most MAX_REASON_CHARS characters.

    The text comes from a peer, which could otherwise forge a log line with an embedded newline.
    """
    if not text:
        return text
    line = escaped(" ".join(text.split()))
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def escaped(text: str) -> str:
    """Replace non-printable characters, such as newlines, with escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cut_output(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last MAX_OUTPUT_LINES lines of a process's output, each truncated to MAX_OUTPUT_CHARS."""
    return tuple(line[:MAX_OUTPUT_CHARS] for line in lines[-MAX_OUTPUT_LINES:])


def answer_margin_s(time_left_s: float) -> float:
    """Return how many seconds before its deadline a call is answered, if it arrived with `time_left_s` left."""
    return min(ANSWER_MARGIN_S, ANSWER_MARGIN_SHARE * time_left_s)
