"""The newest incidents, in memory and as files."""

import json
import logging
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job import incidents
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.incidents import DROPPED, LIMIT, IncidentArchive, surplus
from lighthouse.server.config import LighthouseConfig
from lighthouse.store import incident_files
from lighthouse.store.incident_files import IncidentFiles
from lighthouse_protocol.messages.incident import to_document
from lighthouse_protocol.refusals import UnknownName
from tests.lighthouse.evidence import incident, member

UNIX_S = 1_763_806_501.0


class TestArchive:
    def test_ids_are_never_the_same(self):
        kept = IncidentArchive([incident("20251122-101501")])
        assert [kept.make_id(UNIX_S) for _ in range(2)] == ["20251122-101501-2", "20251122-101501-3"]
        assert kept.make_id(UNIX_S + 1) == "20251122-101502"

    def test_the_newest_are_kept(self):
        kept = IncidentArchive()
        for number in range(LIMIT + 10):
            kept.store_incident(incident(f"i{number:03}", job="j" if number % 2 else "k"))
        assert len(kept.summaries()) == LIMIT
        assert [summary.id for summary in kept.summaries("j")[:2]] == ["i209", "i207"]
        with pytest.raises(UnknownName, match="no incident 'i005'; the newest: i209, i208"):
            kept.get_incident("i005")

    def test_a_change_moves_nothing(self):
        kept = IncidentArchive([incident("i1"), incident("i2")])
        kept.store_incident(incident("i1", step_s=3.0))
        assert [(s.id, s.step_s) for s in kept.summaries()] == [("i2", None), ("i1", 3.0)]

    def test_old_evidence_is_dropped(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(incidents, "MAX_ARCHIVE_BYTES", 1000)
        kept = IncidentArchive()
        for name in ("i1", "i2", "i3"):
            kept.store_incident(incident(name, member("b/1", stacks="x" * 400, flight_recorder="", process="")))
        assert [bool(kept.get_incident(name).evidence) for name in ("i1", "i2", "i3")] == [False, True, True]
        assert kept.get_incident("i1").missing == (DROPPED,)


@given(
    jobs=st.lists(st.sampled_from("abcd"), max_size=40),
    sizes=st.lists(st.integers(0, 50), min_size=40, max_size=40),
    limit=st.integers(1, 20),
    max_bytes=st.integers(0, 400),
)
def test_what_is_dropped_is_the_oldest_of_the_job_that_has_most(
    jobs: list[str], sizes: list[int], limit: int, max_bytes: int
):
    kept = [(str(number), job, size) for number, (job, size) in enumerate(zip(jobs, sizes, strict=False))]
    dropped = set(surplus(kept, limit, max_bytes))
    left = [each for each in kept if each[0] not in dropped]
    assert len(left) <= limit
    assert sum(size for *_, size in left) <= max_bytes or len(left) == 1
    for job in set(jobs):
        own = [id in dropped for id, of, _ in kept if of == job]
        assert own == sorted(own, reverse=True), "the oldest go first"


def test_a_flood_of_one_job_pushes_out_no_incident_of_another():
    kept = IncidentArchive([incident("i000", job="mine")])
    for number in range(1, 3 * LIMIT):
        kept.store_incident(incident(f"i{number:03}", job=f"flood{number % 3}"))
    assert len(kept.summaries()) == LIMIT
    assert [summary.id for summary in kept.summaries("mine")] == ["i000"]


def test_nor_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(incident_files, "LIMIT", 5)
    files = IncidentFiles(tmp_path)
    for number in range(20):
        files.save(incident(f"i{number:03}", job="flood" if number else "mine"))
    files.close()
    again = IncidentFiles(tmp_path)
    assert sorted({each.summary.job for each in again.load()}) == ["flood", "mine"]
    again.save(incident("i100", job="flood"))
    again.close()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["i000", "i017", "i018", "i019", "i100"]


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({"journal": "/x/journal-1.sqlite"}, "/x/journal-1.incidents"),
        ({"journal": "/x/journal-1.sqlite", "incident_dir": Path("/y")}, "/y"),
        ({"journal": "none"}, None),
        ({"journal": "none", "incident_dir": Path("/y")}, "/y"),
    ],
)
def test_where_they_are_filed(options: dict[str, Any], folder: str | None):
    config = LighthouseConfig(**options)
    assert config.incident_folder(config.memory()) == (None if folder is None else Path(folder))


class TestFiles:
    def test_a_lighthouse_that_starts_again_still_has_them(self, tmp_path: Path):
        folder = tmp_path / "new" / "incidents"
        registry = IncidentRegistry(files=IncidentFiles(folder))
        registry.load_stored()
        told = incident(registry.archive.make_id(UNIX_S), member("b/1"))
        registry.record_opened(told)
        registry.record_changed(incident(told.id, member("b/1"), action="notified"))
        registry.close()
        assert [path.name for path in folder.iterdir()] == ["20251122-101501.json"]
        assert stat.S_IMODE((folder / "20251122-101501.json").stat().st_mode) == 0o600

        after = IncidentRegistry(files=IncidentFiles(folder))
        after.load_stored()
        assert after.archive.get_incident(told.id) == incident(told.id, member("b/1"), action="notified")
        assert after.archive.make_id(UNIX_S) == "20251122-101501-2"
        after.close()

    def test_their_number_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(incident_files, "LIMIT", 3)
        files = IncidentFiles(tmp_path)
        for number in range(6):
            files.save(incident(f"i{number}"))
        files.close()
        assert sorted(path.stem for path in tmp_path.iterdir()) == ["i3", "i4", "i5"]

    def test_their_size_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(incident_files, "MAX_FOLDER_BYTES", 10_000)
        files = IncidentFiles(tmp_path)
        for number in range(4):
            files.save(incident(f"i{number}", member("b/1", stacks="x" * 4000)))
        files.save(incident("i4", member("b/1", stacks="x" * 40_000)))
        files.close()
        assert sorted(path.stem for path in tmp_path.iterdir()) == ["i4"], "the newest, whatever its size"

    def test_what_is_no_incident_is_left_alone(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        for name, text in (("a", "{}"), ("b", "no JSON"), ("c", "[" * 100_000), ("d", "[1]")):
            (tmp_path / f"{name}.json").write_text(text)
        files = IncidentFiles(tmp_path)
        assert files.load() == []
        assert [message.split()[1].rpartition("/")[2].rstrip(",") for message in caplog.messages] == [
            f"{n}.json" for n in "abcd"
        ]
        assert len(list(tmp_path.iterdir())) == 4
        files.close()

    @pytest.mark.parametrize("changed", [{"opened_unix_s": "noon"}, {"noticed_s": math.nan}, {"quorum_id": 2**63}])
    def test_one_with_a_value_that_no_status_can_contain_is_left_alone(self, tmp_path: Path, changed: dict[str, Any]):
        """Before, the lighthouse did not start, or no status could be read."""
        for document in (to_document(incident("i1")), {**to_document(incident("i2")), **changed}):
            (tmp_path / f"{document['id']}.json").write_text(json.dumps(document))
        files = IncidentFiles(tmp_path)
        assert [each.id for each in files.load()] == ["i1"]
        files.close()

    def test_a_folder_that_cannot_be_written_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        caplog.set_level(logging.WARNING)
        (tmp_path / "file").write_text("")
        files = IncidentFiles(tmp_path / "file")
        assert files.load() == []
        for number in range(3):
            files.save(incident(f"i{number}"))
        files.close()
        [said] = caplog.messages
        assert "incident i0 was not saved" in said
        assert "--incident-dir" in said
