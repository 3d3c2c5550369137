"""The plan of the long run can be drawn again, and its record is checked."""

import json
from pathlib import Path
from unittest.mock import Mock

from click.testing import CliRunner

from tests.chaos.prove import FAULTS, Job, examine, main, newest_step, pauses
from tests.chaos.proving_rank import SAMPLES


def event(step: int, digest: str, used: list[int], participants: int = 1) -> str:
    return json.dumps([0.0, step, 7, participants, digest, used]) + "\n"


def test_a_fault_depends_on_its_part_and_number_alone() -> None:
    def drawn(part: int, numbers: list[int]) -> list[object]:
        job = Job(part, Mock(), list("abcdefgh"), Path())  # type: ignore[arg-type]
        return [job.draw(number) for number in numbers]

    assert drawn(3, [17, 4, 17]) == [drawn(3, [n])[0] for n in (17, 4, 17)]
    assert drawn(3, [*range(50)]) != drawn(4, [*range(50)])
    assert {fault for fault, _ in drawn(1, [*range(200)])} == set(FAULTS)  # type: ignore[misc]


def test_its_record_shows_other_weights_and_a_cut_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.events").write_text(event(1, "x", [0], 2) + event(2, "y", [1], 2) + "[0.0, 3, 7, 1, ")
    (tmp_path / "b.events").write_text(event(1, "x", [2], 2) + event(2, "z", [3], 2))
    record = examine(tmp_path)
    assert (record.steps, record.commits) == (2, 4)
    assert record.wrong == ["b.events: step 2 of quorum 7 has other weights"]
    assert newest_step(tmp_path) == 2


def test_its_record_shows_a_sample_that_was_used_twice(tmp_path: Path) -> None:
    whole = [event(step, "x", [step - 1]) for step in range(1, SAMPLES + 1)]
    (tmp_path / "a.events").write_text("".join(whole))
    assert not examine(tmp_path).wrong
    (tmp_path / "a.events").write_text("".join([*whole, event(SAMPLES + 1, "x", [5]), event(SAMPLES + 2, "x", [5])]))
    assert examine(tmp_path).wrong


def test_its_record_shows_steps_that_were_taken_back(tmp_path: Path) -> None:
    def committed(*steps: int) -> str:
        return "".join(json.dumps([at, step, 7 + at, 1, "x", [step]]) + "\n" for at, step in enumerate(steps))

    (tmp_path / "a.events").write_text(committed(1, 2, 2, 3))
    assert examine(tmp_path).wrong == []
    (tmp_path / "a.events").write_text(committed(1, 2, 3, 1))
    assert examine(tmp_path).wrong == ["quorum 10 began with step 1, and step 3 was committed before"]


def test_the_longest_pause_after_each_fault() -> None:
    faults = [(1.95, "kill_rank"), (6.0, "nan"), (9.0, "kill_rank")]
    assert pauses(faults, [1.0, 2.0, 5.5, 5.9, 6.1, 9.1, 10.0]) == {"kill_rank": (2.2, 3.5), "nan": (3.0, 3.0)}


def test_its_command_explains_itself() -> None:
    assert "--replay" in CliRunner().invoke(main, ["--help"]).output
