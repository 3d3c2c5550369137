"""What is written of the leader's records, and what never can be. The suite of the interface: store/test_stores.py."""

import random
import zlib
from collections.abc import Iterator

import pytest

from lighthouse.job.records import JoinState, QuorumRecord, RunRecord, dump_quorum
from lighthouse.store import etcd_store
from lighthouse.store.etcd_client import KeyValue
from lighthouse.store.etcd_store import Batch, EtcdStore
from lighthouse.store.records import Delete, Keys, Put
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import NotLeader, WrongState
from lighthouse_runtime.server.streams import OutputGate
from tests.etcd_cluster import EtcdCluster, needs_etcd
from tests.lighthouse.builders import group
from tests.lighthouse.held_stores import Etcds

REVISION = 41


class Written:
    """A store, the gate before it, and what its lighthouse has said."""

    def __init__(self) -> None:
        self.gate = OutputGate()
        self.said: list[str] = []
        self.woken = 0
        self.store = EtcdStore("/l", self._wake, self.gate.hold)
        self.store.begin(3, REVISION)

    def _wake(self) -> None:
        self.woken += 1

    def say(self, word: str) -> None:
        self.gate.deliver(lambda: self.said.append(word))

    def batch(self) -> Batch:
        batch = self.store.next_batch()
        assert batch is not None
        return batch


def keys_of(batch: Batch) -> list[str]:
    return [change.key.decode() for change in batch.changes]


def test_what_is_said_after_a_record_waits_until_it_is_written() -> None:
    written = Written()
    written.store.commit("j", QuorumRecord(1))
    written.say("quorum 1")
    assert (written.said, written.woken) == ([], 1)
    batch = written.batch()
    assert (batch.revision, batch.version, keys_of(batch)) == (REVISION, 1, ["/l/job/j"])
    written.store.commit("j", QuorumRecord(2))
    written.say("quorum 2")
    assert written.batch() is batch, "the same one until it is known to be written"
    written.store.written()
    assert written.said == ["quorum 1"]
    assert written.batch().version == 2
    written.store.written()
    assert written.said == ["quorum 1", "quorum 2"]
    assert written.store.is_written


def test_a_batch_names_no_key_twice_and_a_range_goes_alone() -> None:
    written = Written()
    run = ("j", "r")
    written.store.commit_run(run, RunRecord(), 0)
    written.store.commit_key(run, (2, KeyKind.ITERATION, "a", b"1"))
    written.store.commit_key(run, (3, KeyKind.ITERATION, "a", b"1"))
    written.store.commit_run(run, RunRecord(), 3)
    batches: list[Batch] = []
    while (batch := written.store.next_batch()) is not None:
        batches.append(batch)
        written.store.written()
    two, three = "/l/key/j/r/0000000000000002/iteration/a", "/l/key/j/r/0000000000000003/iteration/a"
    assert list(map(keys_of, batches)) == [["/l/run/j/r", two, three], ["/l/run/j/r"], ["/l/key/j/r/"]]
    assert batches[2].changes == (Delete(b"/l/key/j/r/", b"/l/key/j/r/0000000000000003/"),)


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "BATCH_OPERATIONS", 3)
    written = Written()
    for i in range(4):
        written.store.commit(f"j{i}", QuorumRecord(1))
    assert len(written.batch().changes) == 3
    monkeypatch.setattr(etcd_store, "BATCH_BYTES", 1)
    written.store.written()
    written.store.commit("large", QuorumRecord(1))
    assert keys_of(written.batch()) == ["/l/job/j3"], "one change always has room"


def test_after_its_leadership_it_writes_nothing_and_says_so() -> None:
    written = Written()
    written.store.commit("j", QuorumRecord(1))
    written.store.end()
    assert written.store.next_batch() is None
    for change in (
        lambda: written.store.commit("j", QuorumRecord(2)),
        lambda: written.store.forget("j"),
        lambda: written.store.commit_run(("j", "r"), RunRecord(), 0),
        lambda: written.store.commit_key(("j", "r"), (1, KeyKind.ITERATION, "a", b"")),
    ):
        with pytest.raises(NotLeader):
            change()


def leader(version: int, revision: int = REVISION) -> KeyValue:
    return KeyValue(b"/l/leader", b"", revision, 50, version, 7)


@pytest.mark.parametrize(
    ("found", "was_written"),
    [(leader(2), True), (leader(1), False), (leader(3), False), (leader(2, 44), False), (None, False)],
)
def test_guards_that_fail_are_an_earlier_attempt_or_the_end(found: KeyValue | None, was_written: bool) -> None:
    assert etcd_store.was_written(Batch(REVISION, 1, ()), found) == was_written


def kv(key: str, value: bytes) -> KeyValue:
    return KeyValue(key.encode(), value, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (kv("/l/job/j", b"?"), "/l/job/j"),
        (kv("/l/run/j/r", b"?"), "/l/run/j/r"),
        (kv("/l/key/j/r/x/iteration/a", zlib.compress(b"?")), "/l/key/j/r/x"),
        (kv("/l/forgotten", b"?"), "/l/forgotten"),
    ],
)
def test_what_cannot_be_read_is_named(found: KeyValue, named: str) -> None:
    with pytest.raises(WrongState, match=f"--store: '{named}"):
        Written().store.take([found])


def test_what_a_newer_lighthouse_adds_is_skipped() -> None:
    written = Written()
    written.store.take([kv("/l/leader", b"?"), kv("/l/of/tomorrow", b"?")])
    assert written.store.load() == {}


def test_keys_of_other_programs_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    foreign = [
        KeyValue(b"/l/\xff\xfe", b"?", 1, 1, 1, 0),
        kv("/l/job/a/b", b"?"),
        kv("/l/job/%6a", b"a name as no lighthouse writes it"),
        kv("/l/key/mine", b"?"),
        kv("/l/", b"?"),
    ]
    written = Written()
    written.store.take([kv("/l/leader", b"?"), *foreign, kv("/l/job/j", zlib.compress(dump_quorum(QuorumRecord(7))))])
    assert written.store.load() == {"j": QuorumRecord(7)}
    assert [r.getMessage() for r in caplog.records] == [
        "--store: ignoring b'/l/' and 4 other keys below /l/, which no lighthouse of this version has written"
    ]


# -- records that do not fit in one request


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "RECORD_BYTES", 300)


def large(quorum_id: int) -> QuorumRecord:
    data = random.Random(quorum_id).randbytes(500).hex()
    return QuorumRecord(quorum_id, Quorum(quorum_id, (group("a", data=data),)), entries={"a": JoinState(0, 0, 0)})


class Disk:
    """What is in etcd after each of the batches of a store."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def write_all(self, store: EtcdStore) -> Iterator[None]:
        """Yield after each batch of the store that has been written."""
        while (batch := store.next_batch()) is not None:
            self._write(batch)
            store.written()
            yield

    def _write(self, batch: Batch) -> None:
        for change in batch.changes:
            match change:
                case Put(key, value):
                    assert len(value) <= etcd_store.RECORD_BYTES
                    self.rows[key] = value
                case Delete(key, end):
                    gone = [row for row in self.rows if row == key or (end is not None and key <= row < end)]
                    for row in gone:
                        del self.rows[row]

    def read(self) -> EtcdStore:
        store = Written().store
        store.take(KeyValue(key, value, 1, 1, 1, 0) for key, value in self.rows.items())
        store.begin(4, REVISION)
        return store


@pytest.mark.usefixtures("small")
def test_a_large_record_is_written_in_parts_and_whole_at_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lighthouse may end after each of its transactions: then the record that was told last is read."""
    monkeypatch.setattr(etcd_store, "BATCH_BYTES", 1)
    disk, store = Disk(), Written().store
    before: list[QuorumRecord] = []
    for record in (large(1), large(2), QuorumRecord(3), large(4)):
        store.commit("j", record)
        batches = 0
        for _ in disk.write_all(store):
            batches += 1
            assert list(disk.read().load().values()) in ([record], before)
        assert batches > 3 or record.quorum is None
        assert disk.read().load() == {"j": record}
        before = [record]
        store = disk.read()  # another lighthouse leads, and knows the parts that are there
    parts = [key for key in disk.rows if b"/part/" in key]
    assert parts == sorted(parts)
    assert {key.rsplit(b"/", 1)[0] for key in parts} == {b"/l/job/j/part/" + disk.rows[b"/l/job/j"].split()[1]}
    store.forget("j")
    list(disk.write_all(store))
    assert list(disk.rows) == [b"/l/job/j"], "none is left behind"


@pytest.mark.usefixtures("small")
def test_a_record_of_which_a_part_is_missing_is_named() -> None:
    disk, store = Disk(), Written().store
    store.commit("j", large(1))
    list(disk.write_all(store))
    del disk.rows[min(key for key in disk.rows if b"/part/" in key)]
    with pytest.raises(
        WrongState, match=r"--store: '/l/job/j' in etcd cannot be read: parts of its set '\w+' are missing"
    ):
        disk.read()


@needs_etcd
def test_etcd_takes_a_record_of_several_megabytes(etcd: EtcdCluster) -> None:
    """As of a thousand groups with all the data that a group may have."""
    stores = Etcds(etcd.store("large"))
    holder = stores.claim()
    data = [random.Random(i).randbytes(2048).hex() for i in range(1000)]
    members = tuple(group(f"g{i}", data=text, wire=text.encode()) for i, text in enumerate(data))
    record = QuorumRecord(5, Quorum(5, members), entries={m.replica_id: JoinState(0, 0, 0) for m in members})
    assert len(zlib.compress(dump_quorum(record))) > 3 * etcd_store.RECORD_BYTES
    holder.store.commit("j", record)
    holder.settle()
    holder.release()
    assert stores.claim().store.load() == {"j": record}
    stores.close()


def test_names_are_kept_apart() -> None:
    keys = Keys("/l")
    assert len({keys.run(name) for name in (("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c"))}) == 3
    assert keys.parts(keys.run(("a%2Fb", "c/ü"))) == ["run", "a%2Fb", "c/ü"]


# -- against etcd


@needs_etcd
def test_a_late_copy_of_a_batch_undoes_nothing(etcd: EtcdCluster) -> None:
    stores = Etcds(etcd.store("late-copy"))
    holder = stores.claim()
    sent: list[Batch] = []
    write = holder.shared._write_batch  # pyright: ignore[reportPrivateUsage]

    async def twice(batch: Batch) -> bool:
        """The answer to the first attempt is lost, and the one before comes once more."""
        sent.append(batch)
        assert await write(batch)
        for earlier in sent[:-1]:
            assert not await write(earlier)
        return await write(batch)

    holder.shared._write_batch = twice  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    for quorum_id in range(1, 6):
        holder.store.commit("j", QuorumRecord(quorum_id))
        holder.settle()
    assert len(sent) == 5
    holder.release()
    assert stores.claim().store.load() == {"j": QuorumRecord(5)}
    stores.close()


@needs_etcd
def test_another_format_is_refused_and_left_as_it_is(etcd: EtcdCluster) -> None:
    stores = Etcds(etcd.store("format"))
    holder = stores.claim()
    holder.store._queue(Put(holder.store.keys.format, b"9"))  # pyright: ignore[reportPrivateUsage]
    holder.store.commit("j", QuorumRecord(1))
    holder.settle()
    holder.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.lighthouse.held_stores.CLAIM_S", 1.0)
        with pytest.raises(TimeoutError):
            stores.claim()
    refusal = stores._holders[-1].shared.refusal()  # pyright: ignore[reportPrivateUsage]
    stores.close()
    assert "'/format/format' in etcd has format 9, but this lighthouse supports only 1" in str(refusal)
