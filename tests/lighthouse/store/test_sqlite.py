"""The journal against real processes, real kills and real damage."""

import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import lighthouse.store.records
import lighthouse.store.sqlite
from lighthouse.job.records import JoinState, PreviousLaunch, QuorumRecord, RestartRecord, RunRecord, Supervisor
from lighthouse.job.store import MemoryStore
from lighthouse.store import sqlite
from lighthouse.store.sqlite import Journal, default_path
from lighthouse_protocol.limits import MAX_QUORUM_ID
from lighthouse_protocol.messages import run
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, WrongState

REPOSITORY = Path(__file__).parents[3]


def record(quorum_id: int, size: int = 2, lease_s: float = 10.0) -> QuorumRecord:
    members = tuple(Participant(f"group-{i}", address=f"h{i}:1", step=quorum_id, wire=b"\x00\xff") for i in range(size))
    return QuorumRecord(
        quorum_id, Quorum(quorum_id, members), True, {p.replica_id: JoinState(1, 2, 0) for p in members}, lease_s
    )


@contextmanager
def claimed(path: Path, owner: str = "") -> Generator[Journal, None, None]:
    journal = Journal(path, owner)
    journal.claim()
    try:
        yield journal
    finally:
        journal.release()


def refusal(path: Path, kind: type[LighthouseError] = LighthouseError) -> str:
    with pytest.raises(kind) as caught:
        Journal(path).claim()
    text = str(caught.value)
    assert text.startswith(f"--journal: {path}")
    return text


@contextmanager
def child(code: str, path: Path, **env: str) -> Generator[subprocess.Popen[str], None, None]:
    """A process that has `journal` on `path`; it is killed at the end."""
    head = (
        "import os, random, signal, sys, time\nfrom pathlib import Path\n"
        "from lighthouse.store.sqlite import Journal\n"
        "from lighthouse.job.records import QuorumRecord as Record\n"
        "from lighthouse_protocol.messages.membership import Participant, Quorum\n"
        "from lighthouse_protocol.refusals import LighthouseError\n"
        f"journal = Journal(Path({str(path)!r}), '[::]:29510')\n"
        "def say(*words): os.write(1, (' '.join(map(str, words)) + chr(10)).encode())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", head + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | env,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- how it is kept


def test_a_commit_reaches_the_disk_before_it_returns(path: Path) -> None:
    with claimed(path) as journal:
        db = journal._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        journal.commit("job", record(1))
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert not db.in_transaction


def test_only_its_user_may_read_it_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "lighthouse" / "journal.sqlite"
    with claimed(path) as journal:
        journal.commit("job", record(1))
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_file_becomes_a_journal(path: Path) -> None:
    path.touch()
    with claimed(path) as journal:
        assert (journal.term, journal.load()) == (1, {})


def test_a_log_and_a_half_made_file_of_an_earlier_journal_are_not_taken_over(path: Path) -> None:
    kill_after_commits(path, 3)
    path.unlink()
    path.with_name("journal.sqlite-wal").write_bytes(b"of another file")
    path.with_name("journal.sqlite.new").write_bytes(b"half")
    with claimed(path) as journal:
        assert (journal.term, journal.load()) == (1, {})


def test_a_whole_log_of_an_earlier_journal_is_not_replayed_into_a_new_one(path: Path) -> None:
    log = path.with_name("journal.sqlite-wal")
    with claimed(path) as journal, closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM record").fetchall()
        journal.commit("job", record(7))
        kept = log.read_bytes()
    assert kept, "somebody reads the file, so the commit stands in the log"
    path.unlink()
    log.write_bytes(kept)
    with claimed(path) as journal:
        assert (journal.term, journal.load()) == (1, {})


def test_a_change_that_fails_in_the_middle_leaves_nothing_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_row = sqlite.put_row

    def fail(db: sqlite3.Connection, key: bytes, value: bytes) -> None:
        if key == b"/forgotten":
            raise sqlite3.OperationalError("disk I/O error")
        put_row(db, key, value)

    with claimed(path) as journal:
        journal.commit("job", record(7))
        with monkeypatch.context() as patched:
            patched.setattr(lighthouse.store.records, "FORGOTTEN_JOBS", 0)
            patched.setattr(lighthouse.store.sqlite, "put_row", fail)
            with pytest.raises(WrongState, match="disk I/O error"):
                journal.forget("job")
        assert journal.load() == {"job": record(7)}
    with claimed(path) as journal:
        assert journal.load() == {"job": record(7)}


def test_a_job_that_has_no_id_left_is_refused(path: Path) -> None:
    with claimed(path) as journal:
        journal.commit("job", record(MAX_QUORUM_ID))
    assert "has no id left" in refusal(path)


def test_odd_names_and_links(tmp_path: Path) -> None:
    file, link = tmp_path / "a b?mode=ro#%41ü.sqlite", tmp_path / "link"
    link.symlink_to(file)
    with claimed(link):
        assert "held by" in refusal(file, WrongState)
    assert file.is_file()
    assert link.is_symlink()


@pytest.mark.parametrize(("state", "folder"), [("/x/y", "/x/y"), ("", "/h/.local/state"), ("rel", "/h/.local/state")])
def test_the_default_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, state: str, folder: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_STATE_HOME", state)
    assert default_path() == Path(folder) / "lighthouse" / "journal.sqlite"


# -- one lighthouse a journal

HOLD = "say(journal.claim()); time.sleep(60)"


def test_a_second_lighthouse_is_told_who_holds_it_and_a_kill_frees_it(path: Path) -> None:
    with child(HOLD, path) as holder:
        assert line(holder) == "1"
        text = refusal(path, WrongState)
        assert f"held by the lighthouse at [::]:29510 (pid {holder.pid} on host " in text
        assert ", since 20" in text
        assert "stop that one, or name another file by --journal" in text
        holder.kill()
        holder.wait()
        with claimed(path) as journal:
            assert journal.term == 2


def test_the_same_process_cannot_hold_it_twice(path: Path) -> None:
    with claimed(path, "first") as journal:
        assert f"at first (pid {os.getpid()} " in refusal(path)
        with pytest.raises(WrongState, match="at first"):
            journal.claim()
        journal.commit("job", record(1))


def test_of_many_that_start_at_once_one_gets_it_and_all_others_name_it(path: Path) -> None:
    code = (
        "sys.stdin.read(1)\n"
        "try: say('has', journal.claim(), os.getpid())\n"
        "except LighthouseError as e: say(e)\n"
        "time.sleep(60)"
    )
    for term in (1, 2, 3):
        with child(code, path) as a, child(code, path) as b, child(code, path) as c, child(code, path) as d:
            for each in (a, b, c, d):
                assert each.stdin is not None
                each.stdin.write("x" * 2)
            for each in (a, b, c, d):
                assert each.stdin is not None
                each.stdin.close()
            said = sorted(map(line, (a, b, c, d)), key=lambda text: not text.startswith("has"))
            pid = said[0].removeprefix(f"has {term} ")
            assert pid.isdigit(), said
            assert all(f"(pid {pid} on host" in text for text in said[1:]), said


def test_a_forked_child_does_not_have_it(path: Path) -> None:
    code = (
        "journal.claim(); journal.commit('job', Record(1))\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try: journal.commit('job', Record(2)); say('committed')\n"
        "    except LighthouseError as e: say(e)\n"
        "    journal.release(); say(os.getpid())\n"
        "time.sleep(60)"
    )
    with child(code, path) as holder:
        said, pid = line(holder), int(line(holder))
        assert "not claimed by this process" in said
        try:
            assert f"pid {holder.pid} " in refusal(path)
            holder.kill()
            holder.wait()
            os.kill(pid, 0)
            with claimed(path) as journal:
                assert journal.load() == {"job": QuorumRecord(1)}
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_forked_child_that_ends_leaves_the_parents_journal_whole(path: Path) -> None:
    code = (
        "journal.claim()\n"
        "for i in range(1, 9):\n"
        "    journal.commit('job', Record(i))\n"
        "    if not os.fork(): journal._db.close(); sys.exit(0)\n"
        "    os.wait(); journal.commit('after', Record(i))\n"
        "say('done'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with child(code, path) as holder:
        assert line(holder) == "done"
        holder.wait()
    with claimed(path) as journal:
        assert journal.load() == {"job": QuorumRecord(8), "after": QuorumRecord(8)}


def test_a_lock_file_removed_by_hand_lets_the_newer_one_win(path: Path) -> None:
    with claimed(path) as old:
        old.commit("job", record(1))
        path.with_name("journal.sqlite.lock").unlink()
        with claimed(path) as new:
            new.commit("job", record(2))
            with pytest.raises(WrongState, match="taken over by another lighthouse \\(term 2, this one's is 1\\)"):
                old.commit("job", record(3))
            with pytest.raises(WrongState, match="taken over by another lighthouse"):
                old.commit_run(RUN, FULL, 0)
            old.release()
            assert "held by" in refusal(path)
            assert new.load() == {"job": record(2)}


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("[", "a process that has not given its name"),
        (
            '{"pid": 1, "host": "elsewhere", "since": "yesterday", "owner": ""}',
            "a lighthouse (pid 1 on host elsewhere, since yesterday)",
        ),
    ],
)
def test_an_odd_holder(path: Path, name: str, holder: str) -> None:
    with claimed(path):
        path.with_name("journal.sqlite.lock").write_text(name)
        assert f"held by {holder}" in refusal(path)


def test_without_a_claim_nothing_is_done(path: Path) -> None:
    journal = Journal(path)
    for call in (lambda: journal.commit("job", record(1)), lambda: journal.commit_run(RUN, FULL, 0)):
        with pytest.raises(WrongState, match="is not claimed by this process"):
            call()
    assert not path.exists()


# -- kills

COMMITS = """
journal.claim()
members = tuple(Participant(f"group-{i}", data="x" * random.randrange(300)) for i in range(40))
i = journal.last_id("job")
while True:
    i += 1
    journal.commit("job", Record(i, Quorum(i, members[: i % 40]), True, {}, 10.0))
    say(i)
"""


def kill_after_commits(path: Path, count: int, then_s: float = 0.0) -> int:
    """Kill a process that commits, at the soonest after `count` commits; the last id that it said it had committed."""
    with child(COMMITS, path) as process:
        last = [int(line(process)) for _ in range(count)][-1]
        time.sleep(then_s)
        process.kill()
        assert process.stdout is not None
        said = process.stdout.read()
        whole = said[: said.rfind("\n") + 1].split()
        return int(whole[-1]) if whole else last


def test_what_was_committed_survives_a_kill_at_any_moment(path: Path) -> None:
    draw = random.Random(20)
    for term in range(1, 21):
        said = kill_after_commits(path, 1, draw.uniform(0, 0.1))
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:  # what a plain reader finds
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with claimed(path) as journal:
            found = journal.load()["job"]
            assert found.quorum_id in (said, said + 1)
            assert found.quorum is not None
            assert found.quorum.quorum_id == found.quorum_id
            assert journal.term == 2 * term


# -- refused, and unchanged


def written(path: Path) -> bytes:
    with claimed(path) as journal:
        journal.commit("job", record(5, size=100))
        journal.commit("old", record(9))
        journal.forget("old")
    return path.read_bytes()


def flip(raw: bytes, needle: bytes) -> bytes:
    at = raw.index(needle)
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def edited(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        written(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    return edit


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(written(path)))


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE job (name)")


REFUSED: dict[str, tuple[Callable[[Path], object], type[LighthouseError], str]] = {
    "text": (lambda path: path.write_text("Dear diary"), InvalidRequest, "is not a journal; name another file"),
    "another program's": (other_database, InvalidRequest, "belongs to another program; name another file"),
    "newer": (edited("PRAGMA user_version = 4"), WrongState, "has version 4, and this lighthouse knows 3: start the"),
    "half": (changed(lambda raw: raw[: len(raw) // 2]), WrongState, "move it away (and keep it)"),
    "header only": (
        changed(lambda raw: raw[:50]),
        WrongState,
        "is damaged (it is cut off); move it away (and keep it)",
    ),
    "a bad page": (
        changed(lambda raw: raw[:8192] + b"\xa5" * 4096 + raw[12288:]),
        WrongState,
        "move it away (and keep",
    ),
    "an index": (changed(lambda raw: raw[:12288] + b"\xa5" * 4096 + raw[16384:]), WrongState, "is damaged ("),
    "a bit in a record": (
        changed(lambda raw: flip(raw, b"group-77")),
        WrongState,
        "is damaged ('/job/job' is not what",
    ),
    "an id": (edited("UPDATE record SET value = '{}' WHERE key = '/job/old'"), WrongState, "'/job/old' is not what"),
    "a term": (edited("UPDATE record SET value = '0' WHERE key = '/term'"), WrongState, "its term is not what was"),
    "no term": (edited("DELETE FROM record WHERE key = '/term'"), WrongState, "is damaged (its term is not what was"),
    "no table": (edited("DROP TABLE record"), WrongState, "its table is not the one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_cannot_be_trusted_is_refused_and_not_changed(path: Path, what: str) -> None:
    make, kind, words = REFUSED[what]
    make(path)
    before = path.read_bytes()
    text = refusal(path, kind)
    assert words in text
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_any_single_bit_of_a_journal_is_noticed_or_harmless(path: Path) -> None:
    """Its tables are kept as text: a column of another name is as good as any to SQLite's own check."""
    raw = written(path)
    with claimed(path) as journal:
        kept = journal.load()
    tables = range(raw.index(b"CREATE TABLE record"), raw.index(b"checksum", raw.index(b"CREATE TABLE record")))
    draw = random.Random(7)
    for at in (*tables, *draw.sample(range(len(raw)), 60)):
        damaged = raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
        path.write_bytes(damaged)
        journal = Journal(path)
        try:
            journal.claim()
        except LighthouseError as e:
            assert str(e).startswith(f"--journal: {path}")
            assert at not in tables or "move it away (and keep it)" in str(e)
            assert path.read_bytes() == damaged
        else:
            assert journal.load() == kept
            journal.commit("new", record(10**9))
            journal.release()


def test_a_newer_journal_whose_lighthouse_was_killed_keeps_its_log(path: Path) -> None:
    newer = "journal.claim(); journal._db.execute('PRAGMA user_version = 4'); say(0); time.sleep(60)"
    with child(newer, path) as process:
        assert line(process) == "0"
    log = path.with_name("journal.sqlite-wal")
    before = (path.read_bytes(), log.read_bytes())
    assert before[1]
    assert "has version 4" in refusal(path, WrongState)
    assert (path.read_bytes(), log.read_bytes()) == before


def test_a_directory_and_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a directory; name a file in it" in refusal(tmp_path, InvalidRequest)
    assert "is not a regular file" in refusal(pipe, InvalidRequest)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_as_folder_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(tmp_path / "file" / "journal.sqlite", WrongState)
    assert "name another file by --journal" in refusal(Path("/proc/lighthouse/journal.sqlite"), WrongState)


AS_NOBODY = """
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: say(journal.claim())
except LighthouseError as e: say(type(e).__name__, e)
"""


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "works"),
    [(0o777, 0o666, True), (0o777, 0o444, False), (0o555, 0o666, False), (0o777, 0o000, False), (0o000, 0o666, False)],
)
def test_permissions(folder_mode: int, file_mode: int, works: bool) -> None:
    with tempfile.TemporaryDirectory() as outer:
        path = Path(outer, "folder", "journal.sqlite")
        before = written(path)
        os.chmod(outer, 0o755)
        path.chmod(file_mode)
        path.parent.chmod(folder_mode)
        with child(AS_NOBODY, path) as process:
            said = line(process)
        path.parent.chmod(0o700)
        path.chmod(0o600)
        if works:
            assert said == "2"
        else:
            assert said.startswith(f"WrongState --journal: {path}: Permission denied; ")
            assert "must be able to write the file and its folder" in said
            assert path.read_bytes() == before


def test_a_lack_of_descriptors_is_no_lack_of_permission(path: Path) -> None:
    written(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = os.open("/", os.O_RDONLY)
    os.close(opened)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened, hard))
    try:
        with pytest.raises(WrongState, match="Too many open files; raise the limit of open files"):
            Journal(path).claim()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_disk_refuses_the_commit_and_the_next_one_works_again(path: Path) -> None:
    with claimed(path) as journal:
        journal.commit("job", record(1))
        db = journal._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        db.execute("PRAGMA max_page_count = 1")
        with pytest.raises(WrongState, match=f"--journal: {path}: .* full; free space on its disk"):
            journal.commit("job", record(2, size=1000))
        assert journal.load() == {"job": record(1)}
        db.execute("PRAGMA max_page_count = 100000")
        journal.commit("job", record(3, size=1000))
        assert journal.load() == {"job": record(3, size=1000)}


@pytest.mark.parametrize("limit", [0, 10, 2000, 20_000])
def test_a_file_that_cannot_grow_leaves_no_half_made_journal(path: Path, limit: int) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "try: say(journal.claim()); [journal.commit(str(i), Record(i)) for i in range(1, 999)]\n"
        "except LighthouseError as e: say(type(e).__name__, e)"
    )
    with child(code, path) as process:
        said = [line(process), line(process)]
    assert any(text.startswith(f"WrongState --journal: {path}: ") for text in said), said
    if limit < 20_000:
        assert not [file for file in path.parent.iterdir() if ".lock" not in file.name]
    with claimed(path) as journal:
        ids = sorted(int(job) for job in journal.load())
        assert ids == list(range(1, len(ids) + 1))


def test_a_journal_that_is_removed_or_replaced_under_its_lighthouse(path: Path) -> None:
    with claimed(path) as journal:
        journal.commit("job", record(1))
        path.rename(path.with_name("away"))
        with pytest.raises(WrongState, match="removed or replaced under this lighthouse"):
            journal.commit("job", record(2))
        path.write_bytes(b"")
        with pytest.raises(WrongState, match="removed or replaced under this lighthouse"):
            journal.commit("job", record(2))


def test_another_writer_is_not_waited_for_long(path: Path) -> None:
    with claimed(path) as journal, closing(sqlite3.connect(path, isolation_level=None)) as by_hand:
        by_hand.execute("BEGIN IMMEDIATE")
        with pytest.raises(WrongState, match="database is locked; another process has it open; end that one"):
            journal.commit("job", record(1))
        by_hand.execute("ROLLBACK")
        journal.commit("job", record(1))


A, B = run.RankId(0, "a"), run.RankId(1, "b")
FULL = RunRecord(
    counters=run.RunCounters(3, 0, 2, 1),
    terms=run.RunTerms(4, active=2, stride=100),
    generation=run.Generation((A, B), run.RunCounters(3)),
    is_broken=True,
    formed=4,
    stop=run.RunStopped("enough", "operator", 3),
    restarts=(RestartRecord(2, "x", 1.5, "i", (A,), 3, 2.5, 3.5, (run.ProcessLost(A, "y", ("l",)),)),),
    ending={"s": "enough"},
    finished=(B,),
    completed=3,
    supervisors=(Supervisor(run.SupervisorHello("g", "2", "h", (0, 1)), former=("1",)),),
    excluded=(run.ExcludedHost("h7", "broken", 5.0),),
    former=PreviousLaunch(1, ("old",)),
)
RUN = ("job", "run")


def test_a_run_in_this_process_keeps_its_keys_and_old_spaces_go() -> None:
    memory = MemoryStore()
    memory.commit_run(RUN, FULL, 0)
    for generation, value in ((2, b"1"), (3, b"2"), (3, b"3")):
        memory.commit_key(RUN, (generation, run.KeyKind.ITERATION, "a", value))
    memory.commit_run(RUN, FULL, 3)
    saved = memory.load_run(RUN)
    assert saved is not None
    assert saved.keys == ((3, run.KeyKind.ITERATION, "a", b"3"),)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE record SET value = '{}' WHERE key = '/run/job/run'",
        "UPDATE record SET key = '/run/job/other' WHERE key = '/run/job/run'",
        "UPDATE record SET value = '2' WHERE key LIKE '/key/%'",
        "UPDATE record SET key = '/key/job/run/4' WHERE key LIKE '/key/%'",
    ],
)
def test_what_is_damaged_is_named_and_left_as_it_is(path: Path, damage: str):
    with claimed(path) as journal:
        journal.commit_run(RUN, FULL, 0)
        journal.commit_key(RUN, (3, run.KeyKind.ITERATION, "a", b"1"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    before = path.read_bytes()
    moved = "other" in damage
    with pytest.raises(WrongState, match="is damaged") as caught:
        Journal(path).claim()
    assert ("other" if moved else "run") in str(caught.value)
    assert path.read_bytes() == before
