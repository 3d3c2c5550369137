"""The table of README.md and of the docs: its cells come from reports, and pages change only between the markers."""

import math
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.step_overhead import OWN_CLIENT, REFERENCE, SAME_CLIENT
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import show_machine
from benchmarks.table import BEGIN, END, ROWS, render, replace
from benchmarks.torchrun import C10D, LIGHTHOUSE


def recovery(product: str, *committed_s: float) -> list[dict[str, Any]]:
    runs = [{"committed_s": value} for value in committed_s]
    return [{"fault": fault, "product": product, "runs": runs} for fault in ("kill-group", "kill-rank", "stop")]


def server(product: str, wall_s: float) -> dict[str, Any]:
    return {"product": product, "wall_s": {"median": wall_s}}


def losses(backend: str, *recovered_s: float | None) -> list[dict[str, Any]]:
    return [{"backend": backend, "recovered_s": value} for value in recovered_s]


def reports(*, with_torchft: bool) -> dict[str, dict[str, Any]]:
    theirs = slice(None) if with_torchft else slice(1)
    contenders = [(OWN_CLIENT, 0.0009), (SAME_CLIENT, 0.003), (REFERENCE, 0.0017)]
    added = {"ours": {"added_s": {"median": 0.0042}}, "torchft": {"added_s": {"median": 0.0072}}}
    heals = [("hold", 0.322), ("torchft", 0.303)]
    found: dict[str, dict[str, Any]] = {
        "recovery": {"results": [*recovery(OURS, 0.09, 0.061, 0.02), *recovery(TORCHFT, 5.0, math.inf, math.inf)]},
        "restart": {"in_process": {"after_s": [0.3, 0.35, 0.4]}, "torchrun": {"after_s": [5.21]}},
        "torchrun": {"losses": [*losses(LIGHTHOUSE.name, 1.2, 1.7, 1.4), *losses(C10D.name, None, None, 39.8)]},
        "step_overhead": {
            "contenders": [
                {"contender": each.name, "calls": {"both_s": {"median_s": value}}}
                for each, value in contenders[: 3 if with_torchft else 2]
            ]
        },
        "quorum_round": {
            "sizes": [
                {"replica_groups": size, "servers": [server(OURS, size / 1000), server(TORCHFT, size / 500)][theirs]}
                for size in (10, 1000)
            ]
        },
        "heal": {"results": [{"kind": k, "seconds_per_gib": {"median": s}} for k, s in heals[theirs]]},
        "step_time": {"results": added if with_torchft else {"ours": added["ours"]}},
        "keepers": {"keep_every_1": {"kills": [{"lost": n % 2, "again_s": 0.7 + n / 100} for n in range(3)]}},
        "stragglers": {
            "results": [
                {"shares_by_speed": shares, "step_s": step_s, "ideal_s": 1.9}
                for shares, step_s in ((False, 5.0), (True, 2.0))
            ]
        },
        "preemption": {"results": [{"discards": discards, "left_s": 0.1} for discards in (0, 2, 0)]},
        "report": {"results": [{"sum_s": 100.05, "expected_s": 100.0}]},
    }
    if not with_torchft:
        found["recovery"]["results"] = recovery(OURS, 0.061)
    machine = show_machine()
    return {name: {**report, "machine": machine} for name, report in found.items()}


def cells(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [line.split(" | ")[1:3] for line in render(ROWS, found, "page").splitlines() if line.startswith("| ")][2:]


def test_the_cells_are_the_medians_of_the_reports() -> None:
    assert cells(reports(with_torchft=True)) == [
        ["61 ms", "torchft: > 8000 ms"],
        ["0.35 s, in process", "torchrun: 5.21 s"],
        ["1.2 to 1.7 s", "c10d: 39.8 s, or never"],
        ["61 ms", "torchft: > 8000 ms"],
        ["61 ms", "torchft: > 8000 ms"],
        ["0.90 ms", "torchft: 1.70 ms"],
        ["3.00 ms", "torchft: 1.70 ms"],
        ["10.0 ms", "torchft: 20.0 ms"],
        ["1000.0 ms", "torchft: 2000.0 ms"],
        ["0.32 s", "torchft: 0.30 s, without checksums"],
        ["4.2 ms", "torchft: 7.2 ms"],
        ["at most 1, and 0.71 s", "without `--keep-every`: all since the last checkpoint"],
        ["0.95", "without `share_by_speed`: 0.38"],
        ["2 in 3 notices", "not measured"],
        ["0.0500%", "not measured"],
    ]


def test_without_torchft_its_cells_say_so() -> None:
    found = cells(reports(with_torchft=False))
    assert [other for _, other in found].count("not measured") == len(ROWS) - 4
    assert [ours for ours, _ in found] == [ours for ours, _ in cells(reports(with_torchft=True))]


def test_the_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old{END}after\n")
    replace(page, "new")
    assert page.read_text() == f"before\n{BEGIN}new{END}after\n"


@pytest.mark.parametrize("text", ["none", f"{BEGIN}open", f"{END}{BEGIN}", f"{BEGIN}a{END}{BEGIN}b{END}"])
def test_a_page_without_both_markers_is_refused_unchanged(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(click.ClickException, match="each once"):
        replace(page, "new")
    assert page.read_text() == text
