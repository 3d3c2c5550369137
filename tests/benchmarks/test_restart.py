"""The benchmark of restarts reads its times from the lines that a job prints."""

import pytest

from benchmarks.restart import comeback


def test_a_restart_ends_with_the_first_step_of_all_ranks_even_if_a_run_between_fails() -> None:
    lines = ["steps 0 1.0 5 9", "steps 0 1.1 5 9", "raises 0 2.0"]
    lines += ["steps 1 2.5 6 10"]  # the other rank does not get to its first step
    lines += ["[b] steps 2 3.0 7 11", "[b] steps 2 3.5 6 12", "raises 2 4.0", "steps 4 4.2 7 12", "steps 4 4.3 8 12"]
    found = comeback(iter(lines), 3, 2)
    assert found.after_s == pytest.approx([1.5, 0.3])
    assert (found.threads, found.resident_kib) == ((7, 8), (12, 12))
