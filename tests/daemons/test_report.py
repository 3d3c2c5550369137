"""`lighthouse report` of a lighthouse that runs, restarts and ends."""

import json
import time
from contextlib import closing
from typing import Any

import pytest

from agent_client.manager_client.client import ManagerConnection
from tests.processes import LIGHTHOUSE_CODE, PATIENCE_S, Lighthouse, Manager, eventually, run_cli

pytestmark = pytest.mark.slow


def report(*arguments: str) -> dict[str, Any]:
    done = run_cli(LIGHTHOUSE_CODE, "report", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_report_spans_the_lives_of_a_lighthouse_and_needs_none(tmp_path) -> None:
    journal = tmp_path / "journal.sqlite"
    options = ("--journal", str(journal))
    with Lighthouse(*options) as lighthouse:
        with Manager(lighthouse.address, "b", ranks=1) as manager:
            link = ManagerConnection(manager.address, 0, "w", lambda quorum_id, reason: None, returns_within_s=0.0)
            with closing(link):
                step, tag, ends_at = 0, 0, float("inf")
                while time.monotonic() < ends_at:
                    answer = link.ask(step, "", tag_quorum_id=tag, commit_failures=0, timeout_s=PATIENCE_S)
                    assert link.vote(step, True, quorum_id=answer.quorum_id, timeout_s=PATIENCE_S)
                    step, tag, ends_at = step + 1, answer.quorum_id, min(ends_at, time.monotonic() + 1.0)

                def computes() -> dict[str, Any] | None:
                    found = report(lighthouse.address)
                    return found if found["seconds"]["compute"] > 0.2 else None

                first = eventually(computes, "its steps are counted")
                assert list(first["by_group"]) == ["b"]
                assert len(first["by_host"]) == 1
                assert first["group_s"] == pytest.approx(first["recorded_s"], rel=0.01)
        assert lighthouse.stop() == 0
    ended = report(str(journal))
    assert ended["seconds"]["compute"] >= first["seconds"]["compute"]
    with Lighthouse(*options) as lighthouse, Manager(lighthouse.address, "c", ranks=1):
        both = eventually(lambda: (found := report(lighthouse.address))["by_group"].get("c") and found, "it is met")
        assert both["seconds"]["compute"] == pytest.approx(ended["seconds"]["compute"])
        assert both["seconds"]["idle"] > 0
        outside = report(lighthouse.address, "--since", "2001-01-01", "--until", "2001-01-02")
        assert outside["group_s"] == 0


def test_a_lighthouse_without_files_says_how_to_get_a_ledger() -> None:
    with Lighthouse() as lighthouse:
        done = run_cli(LIGHTHOUSE_CODE, "report", lighthouse.address)
        assert done.returncode == 1
        assert "keeps no ledger; start it with --journal or --incident-dir" in done.stderr
