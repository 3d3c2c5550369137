"""What a forked child may do with gRPC once its parent has used it: nothing, and it is told so.

A child has none of the threads by which gRPC moves: there a call would wait past its deadline, for good. With its fork
support gRPC starts them again; where a thread of the parent was in a call at that moment, which with an open stream is
nearly always, the child then aborts at times, and the parent's stream may break. So processes of ours leave that off
(GRPC_ENABLE_FORK_SUPPORT=0), and in a child a new channel is an error, whoever makes it. Set to 1, as gRPC's own
documents ask of whoever needs it, a fork waits until gRPC is at rest, and the child may use it.
"""

import os
from typing import NoReturn

import grpc
import grpc.aio

from lighthouse_protocol.refusals import WrongState

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_TRUE = ("1", "true", "yes")  # as gRPC reads it

_is_used = False


def note_use() -> None:
    """This process has a channel: what it forks from now on has no gRPC."""
    global _is_used
    _is_used = True


def _refuse(*_: object, **__: object) -> NoReturn:
    raise WrongState(
        f"process {os.getpid()} was forked from one that uses gRPC, and a call of its own would never end: start it "
        f"with multiprocessing's spawn or forkserver, or set {VARIABLE}=1 before the parent starts (a fork may then "
        "take 5 s); lighthouse-manager run --observe off leaves a script without an Agent alone"
    )


def _after_fork() -> None:
    if _is_used and os.environ.get(VARIABLE, "").lower() not in _TRUE:
        for module in (grpc, grpc.aio):
            for make_channel in ("insecure_channel", "secure_channel"):
                setattr(module, make_channel, _refuse)


os.register_at_fork(after_in_child=_after_fork)
