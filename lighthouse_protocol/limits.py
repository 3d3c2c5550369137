"""Numbers that both ends of a wire must agree on."""

from collections.abc import Sequence

LIGHTHOUSE_PORT = 29510
LIGHTHOUSE_HTTP_PORT = 29511
MANAGER_PORT = 29512

KEEPALIVE_S = 2.0
"""The connections of paused and vanished callers are closed after that: half of it without traffic, half for an answer
to a ping."""

MAX_REPLICA_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_DATA_BYTES = 4096
MAX_MEMBER_BYTES = 16 * 1024  # of one participant, with all that is relayed unread
MAX_GROUP_WORLD_SIZE = 65536
MAX_RANKS_PER_HOST = 256  # under one supervisor
MAX_COUNT = 2**53  # of steps, and of all that is counted: a JSON number, and a float, hold it exactly
MAX_QUORUM_ID = 2**53
MAX_LEARNED_GENERATION = 2**48  # told by a rank that comes; what follows stays below MAX_COUNT, whatever the stride
MAX_RESTARTS = 1000  # of a budget: a run's record keeps the moment of each
MAX_SECONDS = 1e10  # of a length of time, and of a moment since 1970
MIN_SECRET_CHARS = 32  # 16 random bytes in hexadecimal: not to be guessed
SECRET_BYTES = 32  # of ours
MAX_SECRET_CHARS = 128
MAX_REASON_CHARS = 1000  # of a refusal or an order; a status travels in a header, which has a limit of its own

# Of the last lines that a lost worker wrote.
MAX_OUTPUT_LINES = 32
MAX_OUTPUT_CHARS = 240

# One participant takes some 200 bytes (4.5 KiB with full `data`); a quorum of 10,000 must still fit.
MAX_REQUEST_BYTES = 256 * 1024
MAX_RESPONSE_BYTES = 64 * 1024 * 1024

# By which a manager knows its group's ranks; never an option: command lines are public.
MANAGER_SECRET_VARIABLE = "LIGHTHOUSE_MANAGER_SECRET"
JOB_METADATA_KEY = "lighthouse-job"
RUN_METADATA_KEY = "lighthouse-run"
TOKEN_METADATA_KEY = "authorization"
TOKEN_SCHEME = "Bearer "
# On a status that a daemon of ours sent, as against one that gRPC made of a broken connection.
REFUSAL_METADATA_KEY = "lighthouse-refusal"
# The leader's address, on the refusal of a lighthouse that follows it.
LEADER_METADATA_KEY = "lighthouse-leader"
DEFAULT_JOB = "default"
DEFAULT_STRIDE = 100
MASTER_PORT = 29500  # where MASTER_PORT is not set
STORE_PORT_OFFSET = 2
"""From MASTER_PORT to the port of the TCPStore that outlives the ranks."""
DEFAULT_RUN = "default"

# What a daemon keeps in hand to answer a waiting call with its reason before the caller's own deadline ends it.
ANSWER_MARGIN_S = 0.25
ANSWER_MARGIN_SHARE = 0.1

# A call for a quorum outlives the wait for stragglers by this: the quorum that ends the wait still reaches its caller,
# and a group whose call began after the lighthouse's wait did loses no step to a race of two timeouts.
JOIN_TIMEOUT_S = 60.0
QUORUM_TIMEOUT_S = JOIN_TIMEOUT_S + 30.0


def cut_reason(text: str) -> str:
    """One printable line, of bounded length: whatever others have written, it must not break an answer, and a second
    line in a log could pass for ours."""
    if not text:
        return text
    line = "".join(map(_visible, " ".join(text.split())))
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def cut_output(lines: Sequence[str]) -> tuple[str, ...]:
    """The last of what a worker wrote, as it is kept."""
    return tuple(line[:MAX_OUTPUT_CHARS] for line in lines[-MAX_OUTPUT_LINES:])


def answer_margin_s(time_left_s: float) -> float:
    """How long before its deadline a call is answered, whatever there is to say."""
    return min(ANSWER_MARGIN_S, ANSWER_MARGIN_SHARE * time_left_s)
