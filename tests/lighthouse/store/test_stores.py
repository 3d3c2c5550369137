"""The interface of the store: one suite for both that there are. What only one of them does stands in test_sqlite.py,
and in test_etcd_store.py."""

import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse.job.records import QuorumRecord, RunRecord, SavedRun
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import LighthouseError
from tests.etcd_cluster import EtcdCluster, needs_etcd
from tests.lighthouse.held_stores import Etcds, Holder, Journals, Stores
from tests.lighthouse.job.test_records import RECORDS, wires
from tests.lighthouse.store.test_sqlite import FULL, RUN, record

Make = Callable[[], Stores]


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=needs_etcd)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """An empty place."""
    with tempfile.TemporaryDirectory() as folder:
        if request.param == "sqlite":
            yield lambda: Journals(Path(folder, uuid.uuid4().hex, "journal.sqlite"))
        else:
            cluster: EtcdCluster = request.getfixturevalue("etcd")
            yield lambda: Etcds(cluster.store(uuid.uuid4().hex))


@pytest.fixture
def stores(make: Make) -> Iterator[Stores]:
    with closing(make()) as stores:
        yield stores


def restarted(stores: Stores, holder: Holder) -> Holder:
    """The next lighthouse. `holder` has ended with all its records written."""
    holder.settle()
    holder.release()
    return stores.claim()


# -- jobs

Step = tuple[str, str, QuorumRecord]
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["commit", "commit", "forget", "restart"]), st.sampled_from(["a", "b", "ü"]), RECORDS),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(STEPS)
def test_what_was_committed_is_loaded_again(make: Make, steps: list[Step]) -> None:
    kept: dict[str, QuorumRecord] = {}
    with closing(make()) as stores:
        holder = stores.claim()
        terms = [holder.store.term]
        for what, job, drawn in [*steps, ("restart", "a", record(1))]:
            highest = kept[job].quorum_id if job in kept else 0
            if what == "commit" and drawn.quorum_id >= highest:
                holder.store.commit(job, drawn)
                kept[job] = drawn
            elif what == "forget":
                holder.store.forget(job)
                kept |= {job: QuorumRecord(highest)} if job in kept else {}
            elif what == "restart":
                holder = restarted(stores, holder)
                terms.append(holder.store.term)
            assert holder.store.load() == kept
        found = holder.store.load()
        assert {job: wires(found[job]) for job in found} == {job: wires(kept[job]) for job in kept}
        assert {job: holder.store.last_id(job) for job in kept} == {job: kept[job].quorum_id for job in kept}
        assert terms == list(range(1, len(terms) + 1))
        holder.release()


def test_an_id_never_goes_back(stores: Stores) -> None:
    holder = stores.claim()
    holder.store.commit("job", record(7))
    with pytest.raises(ValueError, match="job named quorum 7"):
        holder.store.commit("job", record(6))
    holder.store.forget("job")
    with pytest.raises(ValueError, match="job named quorum 7"):
        holder.store.commit("job", record(6))
    assert holder.store.load() == {"job": QuorumRecord(7)}
    assert restarted(stores, holder).store.load() == {"job": QuorumRecord(7)}


def test_of_many_forgotten_jobs_one_number_is_left(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in stores.limits:
        monkeypatch.setattr(module, "FORGOTTEN_JOBS", 3, raising=False)
    holder = stores.claim()
    holder.store.commit("alive", record(1))
    for i in (10, 60, 30, 40, 50):
        holder.store.commit(f"job-{i}", record(i))
    for i in (60, 10, 30, 40, 50):
        holder.store.forget(f"job-{i}")
    store = restarted(stores, holder).store
    assert store.load() == {
        "alive": record(1),
        "job-30": QuorumRecord(30),
        "job-40": QuorumRecord(40),
        "job-50": QuorumRecord(50),
    }
    assert store.last_id("job-30") == 30
    assert [store.last_id(job) for job in ("job-60", "job-10", "unheard of")] == [60, 60, 60]


def test_a_quorum_of_ten_thousand_groups_and_many_records_at_once(stores: Stores) -> None:
    holder = stores.claim()
    for i in range(300):
        holder.store.commit(f"job-{i}", record(i))
    holder.store.commit("large", record(9, size=10_000))
    found = restarted(stores, holder).store.load()
    assert len(found) == 301
    assert found["large"] == record(9, size=10_000)


# -- runs


def test_a_run_and_its_keys_are_there_again(stores: Stores) -> None:
    holder = stores.claim()
    store = holder.store
    assert store.load_run(RUN) is None
    odd = ("job/../x", "run:a@b")
    store.commit_run(odd, RunRecord(), 0)
    store.commit_run(RUN, FULL, 0)
    for row in (
        (2, KeyKind.ITERATION, "a", b"1"),
        (3, KeyKind.ITERATION, "a", b"2"),
        (3, KeyKind.ITERATION, "a", b"3"),
        (10, KeyKind.ITERATION, "ü/ \n", b"\x00\xff"),
    ):
        store.commit_key(RUN, row)
    store.commit_run(odd, FULL, 0)
    for _ in range(2):
        assert store.run_names(10) == [RUN, odd]
        assert store.run_names(1) == [odd]
        saved = store.load_run(RUN)
        assert saved is not None
        assert (saved.record, sorted(saved.keys)) == (
            FULL,
            [
                (2, KeyKind.ITERATION, "a", b"1"),
                (3, KeyKind.ITERATION, "a", b"3"),
                (10, KeyKind.ITERATION, "ü/ \n", b"\x00\xff"),
            ],
        )
        assert store.load_run(odd) == SavedRun(FULL)
        assert store.load_run(("other", "run")) is None
        holder = restarted(stores, holder)
        store = holder.store


def test_keys_of_old_generations_go(stores: Stores) -> None:
    holder = stores.claim()
    holder.store.commit_run(RUN, FULL, 0)
    for generation in (2, 9, 10):
        holder.store.commit_key(RUN, (generation, KeyKind.ITERATION, "a", b"1"))
    holder.store.commit_run(RUN, FULL, 10)
    for _ in range(2):
        saved = holder.store.load_run(RUN)
        assert saved is not None
        assert saved.keys == ((10, KeyKind.ITERATION, "a", b"1"),)
        holder = restarted(stores, holder)


def test_the_oldest_finished_runs_go_first(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in stores.limits:
        monkeypatch.setattr(module, "FINISHED_RUNS_KEPT", 2, raising=False)
        monkeypatch.setattr(module, "RUNS_KEPT", 4, raising=False)
    holder = stores.claim()
    for number in range(4):
        holder.store.commit_run(("job", f"finished{number}"), FULL, 0)
        holder.store.commit_key(("job", f"finished{number}"), (3, KeyKind.ITERATION, "a", b"1"))
    assert [run for _, run in holder.store.run_names(-1)] == ["finished2", "finished3"]
    for number in range(4):
        holder.store.commit_run(("job", f"open{number}"), RunRecord(), 0)
    for _ in range(2):
        assert [run for _, run in holder.store.run_names(-1)] == [f"open{number}" for number in range(4)]
        holder = restarted(stores, holder)
    # The keys of those that are gone went with them: one of the same name has none.
    holder.store.commit_run(("job", "finished0"), FULL, 0)
    assert restarted(stores, holder).store.load_run(("job", "finished0")) == SavedRun(FULL)


# -- one lighthouse at a time


def test_what_a_deposed_lighthouse_commits_is_not_kept(stores: Stores) -> None:
    old = stores.claim()
    old.store.commit("job", record(7))
    old.store.commit_run(RUN, FULL, 0)
    old.settle()
    stores.take_away(old)
    new = stores.claim()
    assert new.store.term == old.store.term + 1
    with pytest.raises(LighthouseError):
        old.store.commit("job", record(8))
        old.settle()
    with pytest.raises(LighthouseError):
        old.store.commit_key(RUN, (3, KeyKind.ITERATION, "a", b"1"))
        old.settle()
    new.store.commit("other", record(1))
    store = restarted(stores, new).store
    assert store.load() == {"job": record(7), "other": record(1)}
    assert store.load_run(RUN) == SavedRun(FULL)


def test_one_that_was_deposed_before_its_first_write_is_told_apart_from_its_successor(stores: Stores) -> None:
    old = stores.claim()
    stores.take_away(old)
    new = stores.claim()
    with pytest.raises(LighthouseError):
        old.store.commit("job", record(8))
        old.settle()
    new.store.commit("job", record(7))
    assert restarted(stores, new).store.load() == {"job": record(7)}
