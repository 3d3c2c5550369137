"""The doubles of a whole message at once: for what is read seldom. Others are checked field by field (fields.py)."""

import math

from google.protobuf.message import Message

from lighthouse_protocol.limits import MAX_SECONDS
from lighthouse_protocol.refusals import InvalidRequest


def check_doubles(message: Message) -> None:
    """All of a status, which are lengths of time and moments: none is infinite or absurd. Raises InvalidRequest."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                check_doubles(each)
            elif isinstance(each, float) and not (math.isfinite(each) and abs(each) <= MAX_SECONDS):
                raise InvalidRequest(f"is {each}; it is a number of seconds", field=field.name)
