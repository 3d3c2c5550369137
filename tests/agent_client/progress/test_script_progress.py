"""Where a script without an Agent is: its line, and what it is held by."""

import sys
from types import FrameType
from typing import Any

import pytest

from agent_client.progress import script_groups
from agent_client.progress.progress import _OTHERS, FIRST_COLLECTIVES, ScriptPlace, ScriptProgress
from agent_client.progress.script_groups import STILL_S

SCRIPT = """
def validate(look):
    step(look)
    step(look)
    return look()

def step(look):
    look()
    library(look)

validate(look)
"""
LIBRARY = "def library(look):\n    return look()\n"
COLLECTIVES = "def barrier(look):\n    return look()\n"


def frames(script: str = SCRIPT, path: str = "/job/train.py", **more: Any) -> list[FrameType | None]:
    """At each call of look()."""
    seen: list[FrameType | None] = []
    names: dict[str, Any] = {"look": lambda: seen.append(Frozen(sys._getframe(1))), "__name__": "__main__", **more}
    own: dict[str, Any] = {"__name__": "library"}
    exec(compile(LIBRARY, _OTHERS[0] + "library.py", "exec"), own)
    exec(compile(COLLECTIVES, "/x/torch/distributed/distributed_c10d.py", "exec"), own)
    exec(compile(script, path, "exec"), names | {name: own[name] for name in ("library", "barrier")})
    return seen


class Frozen:
    """A frame as it was."""

    def __init__(self, frame: FrameType) -> None:
        self.f_code, self.f_lineno, self.f_globals = frame.f_code, frame.f_lineno, frame.f_globals
        self.f_back = Frozen(frame.f_back) if frame.f_back is not None and frame.f_code.co_name != "<module>" else None

    def __new__(cls, frame: FrameType) -> Any:
        return super().__new__(cls)


class TestThePlace:
    def test_is_the_scripts_innermost_line_whatever_it_has_called(self):
        place = ScriptPlace()
        seen = [place.locate(frame, now, 0) for now, frame in enumerate(frames())]
        assert seen == [(at, "") for at in ("step (train.py:8)", "step (train.py:9)") * 2 + ("validate (train.py:5)",)]

    def test_of_a_rank_that_does_not_move_is_where_it_has_been_for_half_of_that_time(self):
        place = ScriptPlace()
        first, second, *_, last = frames()
        at = [(first, 0.0), (second, 3.0), (first, 4.0), (second, 6.0), (last, 7.0), (last, 10.0), (last, 14.0)]
        seen = [place.locate(frame, now, now)[0] for frame, now in at]
        assert seen == [
            "step (train.py:8)",
            "validate (train.py:3)",
            "validate (train.py:3)",
            "validate (train.py:3)",
            "train.py:11",
            "train.py:11",
            "validate (train.py:5)",
        ]

    def test_names_what_it_has_called_of_torch_distributed(self):
        assert ScriptPlace().locate(frames("barrier(look)")[0], 0, 0) == ("train.py:1", "barrier")

    def test_of_a_thread_that_is_gone(self):
        assert ScriptPlace().locate(None, 0, 9) == ("", "")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(script_groups, "_counts", lambda: dict(counts))
    monkeypatch.setattr("agent_client.progress.progress._main_frame", lambda: frames("barrier(look)")[0])
    return counts


def test_a_sample_counts_collectives_and_learns_how_long_is_usual(counts: dict[str, int]):
    now = [0.0]
    progress = ScriptProgress(lambda: now[0])
    for entered in (0, 1, FIRST_COLLECTIVES - 1):
        counts["0"] = entered
        assert progress.sample().is_first
    for now[0] in (5.0, 9.0, 10.0, 11.0):
        counts["0"] += 1
        sample = progress.sample()
    assert not sample.is_first
    assert (sample.at, sample.innermost.done, sample.waits_for) == ("train.py:1", FIRST_COLLECTIVES + 3, "")
    counts["0"] += 1
    assert [time.longest_s for time in progress.sample().times] == [4.0]
    now[0] += STILL_S
    assert (progress.sample().waits_for, progress.sample().still_s) == ("barrier", STILL_S)


def test_a_file_whose_name_is_no_text_is_shown() -> None:
    [frame] = frames("look()", "/job/caf\udce9.py")
    assert ScriptPlace().locate(frame, 0.0, 0.0)[0] == "caf\\udce9.py:1"
