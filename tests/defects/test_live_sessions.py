"""torchft's defects 4, 7, 8 and 11: what sessions, the standing quorum and the journal are for, as real processes."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.messages.session import Revoked, WatchHello, WatchOpened
from lighthouse_runtime.client.lighthouse import LighthouseClient
from lighthouse_runtime.client.manager import ManagerClient
from lighthouse_runtime.client.streams import Watch
from tests.processes import Lighthouse, Manager, eventually, together

pytestmark = pytest.mark.slow

LONG_S = 60.0
"""What ends near it has hung, or has waited for a timeout."""
AT_ONCE_S = LONG_S / 6


class Rank:
    """The only rank of a group: its calls, and what its watch hears."""

    def __init__(self, manager: Manager, pool: ThreadPoolExecutor, *, watched: bool = True) -> None:
        self.manager = manager
        self._pool = pool
        self._stack = contextlib.ExitStack()
        self.client = self._stack.enter_context(ManagerClient(manager.address))
        self.revoked: dict[int, str] = {}
        self.watch: Watch | None = self._watched() if watched else None

    def _watched(self) -> Watch:
        watch = self._stack.enter_context(self.client.watch(WatchHello(0, "w"), wait_for_ready=True))
        assert isinstance(next(watch), WatchOpened)
        threading.Thread(target=self._listen, args=(watch,), daemon=True).start()
        return watch

    def _listen(self, watch: Watch) -> None:
        with contextlib.suppress(Exception):  # its manager is killed
            for message in watch:
                if isinstance(message, Revoked):
                    self.revoked[message.quorum_id] = message.reason

    def ask(self, step: int, timeout_s: float = LONG_S, failures: int = 0) -> "Future[Assignment]":
        return self._pool.submit(
            self.client.quorum,
            0,
            step,
            timeout_s=timeout_s,
            commit_failures=failures,
            rank_incarnation="w",
            tag_quorum_id=0,
        )

    def vote(self, step: int, quorum_id: int, yes: bool = True) -> bool:
        return self.client.should_commit(0, step, yes, timeout_s=LONG_S, quorum_id=quorum_id)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(16)
    yield executor
    executor.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def ranks_of(
    lighthouse: Lighthouse, pool: ThreadPoolExecutor, names: str, *, watched: bool = True
) -> Iterator[list[Rank]]:
    with together(*(Manager(lighthouse.address, name) for name in names)) as managers, contextlib.ExitStack() as stack:
        ranks = [Rank(manager, pool, watched=watched) for manager in managers]
        for rank in ranks:
            stack.callback(rank.close)
        with LighthouseClient(lighthouse.address) as client:
            eventually(lambda: alive(client) == set(names), "all are alive")
        yield ranks


def alive(client: LighthouseClient) -> set[str]:
    return {member.replica_id for job in client.status().jobs for member in job.members}


def answered(ranks: list[Rank], step: int, failures: int = 0, timeout_s: float = LONG_S) -> Assignment:
    """All of them ask; what the first one is told."""
    answers = [rank.ask(step, timeout_s, failures) for rank in ranks]
    assignments = [answer.result(LONG_S) for answer in answers]
    assert len({assignment.quorum_id for assignment in assignments}) == 1
    return assignments[0]


# -- 4: quorum_id restarts at 1 with the lighthouse


@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "no journal"])
def test_defect_4_an_id_is_never_used_again(pool: ThreadPoolExecutor, tmp_path: Path, has_journal: bool) -> None:
    journal = ("--journal", str(tmp_path / "journal") if has_journal else "none")
    with Lighthouse("--min-replicas", "2", *journal) as first, ranks_of(first, pool, "ab", watched=False) as ranks:
        before = answered(ranks, 0)
        first.kill()
        with Lighthouse("--min-replicas", "2", "--bind", first.address, *journal):
            assert answered(ranks, 1).quorum_id > before.quorum_id


def test_defect_4_the_lighthouse_is_killed_and_nobody_notices(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    options = ("--min-replicas", "2", "--journal", str(tmp_path / "journal"), "--lease", "10s")
    with Lighthouse(*options) as first, ranks_of(first, pool, "ab") as ranks:
        quorum_id = answered(ranks, 0).quorum_id
        first.kill()
        for step in range(3):
            assert all(rank.vote(step, quorum_id) for rank in ranks)
            assert answered(ranks, step + 1, timeout_s=AT_ONCE_S).quorum_id == quorum_id, "granted without it"
        with Lighthouse(*options, "--bind", first.address) as second, LighthouseClient(second.address) as client:
            eventually(lambda: alive(client) == {"a", "b"}, "both are back")
            assert all(rank.vote(3, quorum_id) for rank in ranks)
            assert answered(ranks, 4).quorum_id == quorum_id
            assert [rank.revoked for rank in ranks] == [{}, {}]


# -- 7: one that ran ahead alone, or has diverged, overwrites all others


def test_defect_7_below_min_replicas_nobody_runs_ahead(pool: ThreadPoolExecutor) -> None:
    """Its lease stands, and yet its step needs the others: it is told so before it commits alone."""
    with (
        Lighthouse("--min-replicas", "2", "--heartbeat-timeout", "2s") as lighthouse,
        ranks_of(lighthouse, pool, "ab") as [a, b],
    ):
        quorum_id = answered([a, b], 0).quorum_id
        b.manager.kill()
        eventually(lambda: quorum_id in a.revoked, "a is told")
        assert not a.vote(0, quorum_id, yes=False)
        assert "1 of at least 2 joined" in str(a.ask(0, 3.0, failures=1).exception(LONG_S))


# -- 8: zombies, whose managers live beside hung ranks


# -- 11: a dead group counts as alive until its heartbeats are old


@pytest.mark.parametrize("how", ["the whole group", "one rank"])
def test_defect_11_a_kill_is_known_at_once(pool: ThreadPoolExecutor, how: str) -> None:
    """However long the timeouts are."""
    timeouts = ("--heartbeat-timeout", f"{LONG_S}s", "--join-timeout", f"{LONG_S}s")
    with Lighthouse("--min-replicas", "1", *timeouts) as lighthouse, ranks_of(lighthouse, pool, "abc") as ranks:
        a, b, c = ranks
        first = answered(ranks, 0)
        assert first.replica_ids == ("a", "b", "c")
        if how == "one rank":
            assert c.watch is not None
            c.watch.cancel()
        else:
            c.manager.kill()
        for rank in (a, b):
            eventually(lambda rank=rank: first.quorum_id in rank.revoked, "it is told", within_s=AT_ONCE_S)
            assert rank.revoked[first.quorum_id].startswith("c: ")
            assert not rank.vote(0, first.quorum_id, yes=False)
        second = answered([a, b], 0, failures=1, timeout_s=AT_ONCE_S)
        assert (second.replica_ids, second.quorum_id > first.quorum_id) == (("a", "b"), True)
