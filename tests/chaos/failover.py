"""Two lighthouses on an etcd of three nodes, groups that train, and faults in a row; then the records of all sides are
read: what etcd kept at each revision, what each lighthouse has said to a witness, and what the groups have done.

    python -m tests.chaos.failover --faults 200
"""

import argparse
import base64
import contextlib
import itertools
import json
import random
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from examples.ports import free_port
from lighthouse.store.etcd_store import Keys, parse_job
from lighthouse.store.leadership import parse as parse_leader
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import GroupReport, Heartbeat, Hello, ToLighthouse, ToManager, Welcome
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.client.streams import SESSION, SyncStream
from tests.daemons.groups import Group, training
from tests.deaf_proxy import DeafProxy
from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, Manager, eventually

TTL_S = 3.0
# Above what a failover takes at most, in the 0.8 of it that a manager uses.
LEASE_S = 10.0
FAILOVER_S = TTL_S + 1.0
STEP_S = 0.02
BEAT_S = 0.05
RECONNECT_S = 0.02
STEPS_AFTER = 5
VISITS_EVERY = 4
JOB = "default"
NAMES = "abc"
BACK_WITHIN_S = 60.0
SETTLED_S = 0.5


# -- what a lighthouse says


@dataclass(frozen=True, slots=True)
class Said:
    """`session` is the number of the witness's session with that lighthouse."""

    at: float
    lighthouse: int
    session: int
    is_welcome: bool


class Witness:
    """A session of its own with each lighthouse, for as long as that takes it; it asks all the time, and notes each
    answer. A context manager, with a thread for each; what is asked here is asked without asyncio, whose gRPC wakes
    nobody any more where a loop of before, in the same process, was closed with a call under way."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.said: list[Said] = []
        self._threads = [
            threading.Thread(target=self._watch, args=where, name=f"witness {where[0]}", daemon=True)
            for where in enumerate(addresses)
        ]
        self._sessions: dict[int, SyncStream[ToLighthouse, ToManager]] = {}
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for session in list(self._sessions.values()):
            session.cancel()
        join(self._threads)

    def welcomes(self, since: float, lighthouse: int | None = None) -> list[Said]:
        said = list(self.said)
        return [s for s in said if s.is_welcome and s.at >= since and lighthouse in (None, s.lighthouse)]

    def _watch(self, number: int, address: str) -> None:
        session = 0
        while not self._is_over.wait(RECONNECT_S):
            session += 1
            with contextlib.suppress(LighthouseError):
                self._hold(number, address, session)

    def _hold(self, number: int, address: str, count: int) -> None:
        beats = itertools.count(1)
        with LighthouseClient(address, job="witness") as client, client.open(SESSION) as session:
            self._sessions[number] = session
            if self._is_over.is_set():
                return
            session.send(Hello(Participant(f"witness-{number}", str(count)), secret=f"{number:032d}"))
            session.repeat(lambda: Heartbeat(next(beats), GroupReport(None)), BEAT_S)
            for message in session:
                self.said.append(Said(time.monotonic(), number, count, isinstance(message, Welcome)))


def join(threads: Sequence[threading.Thread]) -> None:
    """Raises AssertionError where one goes on."""
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), [t.name for t in threads if t.is_alive()]


def check_speakers(said: Sequence[Said]) -> None:
    """Once another lighthouse has begun to speak, one speaks again only where it has been asked anew."""
    begun = [s for s in said if s.is_welcome]
    for message in said:
        mine = next(s for s in begun if (s.lighthouse, s.session) == (message.lighthouse, message.session))
        between = [s for s in begun if s.lighthouse != message.lighthouse and mine.at < s.at < message.at]
        assert not between, (
            f"lighthouse {message.lighthouse} spoke at {message.at:.3f}, {message.at - between[0].at:.3f} s after "
            f"lighthouse {between[0].lighthouse} had begun to lead"
        )


# -- what etcd kept


@dataclass
class History:
    """Of one prefix, revision by revision."""

    lists: dict[int, tuple[str, ...]] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    writes: int = 0


def read_history(cluster: EtcdCluster, prefix: str) -> History:
    """Raises AssertionError where a record was written by no leader, or an id names two lists."""
    names, found = Keys(prefix), History()
    last = _read(cluster, names.all, 0)[0]
    for revision in range(2, last + 1):
        changed = {
            kv["key"]: kv for kv in _read(cluster, names.all, revision)[1] if kv["mod_revision"] == str(revision)
        }
        leader = changed.pop(_text(names.leader), None)
        if leader is not None and leader["version"] == "1":
            found.terms.append(parse_leader(base64.b64decode(leader["value"])).term)
            continue
        for key, kv in changed.items():
            assert leader is not None, f"{base64.b64decode(key)!r} was written at {revision} without its leader's key"
            found.writes += 1
            if key == _text(names.job(JOB)):
                record = parse_job(b"", base64.b64decode(kv["value"]))
                if record.quorum is not None:
                    members = tuple(f"{p.replica_id}/{p.incarnation}" for p in record.quorum.participants)
                    was = found.lists.setdefault(record.quorum.quorum_id, members)
                    assert was == members, f"quorum {record.quorum.quorum_id} names {was} and {members}"
    assert found.terms == sorted(set(found.terms)), f"terms do not rise: {found.terms}"
    return found


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _read(cluster: EtcdCluster, start: bytes, revision: int) -> tuple[int, list[dict[str, Any]]]:
    body = {"key": _text(start), "range_end": _text(start[:-1] + b"0"), "revision": str(revision)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.nodes[0].port}/v3/kv/range", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        document = json.load(answer)
    return int(document["header"]["revision"]), document.get("kvs", [])


# -- the cluster


@dataclass(frozen=True, slots=True)
class Fault:
    """`failover_s`: until a lighthouse spoke again; None: the same one went on. `longest_s`: between two commits."""

    name: str
    failover_s: float | None
    longest_s: float
    discards: int


class Cluster:
    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self.visits = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        stack = self._stack
        with contextlib.ExitStack() as undo:
            undo.enter_context(stack)
            self.etcd = stack.enter_context(etcd_cluster())
            self.prefix = "/failover"
            self._proxies = [[stack.enter_context(DeafProxy(n.port)) for n in self.etcd.nodes] for _ in range(2)]
            self._ports = [free_port(), free_port()]
            self.lighthouses = [self._make(i) for i in range(2)]
            for i in range(2):
                stack.callback(lambda i=i: self.lighthouses[i].close())
                self.lighthouses[i].__enter__()
            addresses = [lighthouse.address for lighthouse in self.lighthouses]
            self.witness = stack.enter_context(Witness(addresses))
            eventually(lambda: self.witness.welcomes(0.0), "a lighthouse leads")
            self.groups: tuple[Group, ...] = stack.enter_context(training(",".join(addresses), JOB, NAMES, STEP_S))
            self._gaps = stack.enter_context(Gaps(self.groups))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, number: int) -> Lighthouse:
        endpoints = ",".join(proxy.address for proxy in self._proxies[number])
        return Lighthouse(
            *("--store", f"etcd://{endpoints}{self.prefix}", "--store-ttl", f"{TTL_S:g}s"),
            *("--bind", f"{LOCALHOST}:{self._ports[number]}", "--lease", f"{LEASE_S:g}s"),
            *("--min-replicas", str(len(NAMES))),
        )

    @property
    def leader(self) -> int:
        """The one that has spoken last."""
        return self.witness.said[-1].lighthouse

    def strike(self, name: str) -> Fault:
        """One fault, until all train again and all that was stopped is back."""
        time.sleep(self.random.uniform(0, SETTLED_S))
        discards = sum(group.discards for group in self.groups)
        self._gaps.reset()
        with self._visitor() if len(self.faults) % VISITS_EVERY == 1 else contextlib.nullcontext():
            struck_at, leader = time.monotonic(), self.leader
            restore = KINDS[name](self, leader)
            failover_s = self._failover(name, struck_at, leader)
            self._until_all_train()
            restore()
            self._until_all_train()
        discarded = sum(group.discards for group in self.groups) - discards
        fault = Fault(name, failover_s, self._gaps.longest_s, discarded)
        self.faults.append(fault)
        return fault

    @contextlib.contextmanager
    def _visitor(self) -> Iterator[None]:
        """One more group comes, a moment before or after what happens meanwhile, and leaves in good order."""
        self.visits += 1
        manager = Manager(",".join(lighthouse.address for lighthouse in self.lighthouses), "visitor")
        with manager, Group("visitor", manager, self.groups[0].reduce, STEP_S) as group:
            time.sleep(self.random.uniform(0, SETTLED_S))
            yield
            eventually(lambda: len(group.commits) > STEPS_AFTER, "the visitor trains", BACK_WITHIN_S)
            assert manager.stop() == 0
            group.join()
            assert group.drained, group.error
        self._until_all_train()

    def _failover(self, name: str, struck_at: float, leader: int) -> float | None:
        if name == "kill an etcd node":
            time.sleep(FAILOVER_S)
            found = self.witness.welcomes(struck_at)
            return found[-1].at - struck_at if found else None
        others = [1 - leader] if name not in ("kill both", "stop gracefully") else [0, 1]
        spoken = eventually(
            lambda: [s for other in others for s in self.witness.welcomes(struck_at, other)],
            f"another lighthouse leads after {name!r}",
            BACK_WITHIN_S,
        )
        return min(s.at for s in spoken) - struck_at

    def _until_all_train(self) -> None:
        before = [len(group.commits) for group in self.groups]

        def look() -> bool:
            errors = [group.error for group in self.groups if group.error]
            assert not errors, errors
            done = zip(self.groups, before, strict=True)
            return all(len(group.commits) >= count + STEPS_AFTER for group, count in done)

        eventually(look, "all train again", BACK_WITHIN_S)

    # -- what happens; each returns how it is restored

    def restart(self, number: int) -> None:
        self.lighthouses[number].close()
        self.lighthouses[number] = self._make(number)
        self.lighthouses[number].__enter__()

    def kill_leader(self, leader: int) -> Callable[[], None]:
        self.lighthouses[leader].kill()
        return lambda: self.restart(leader)

    def stop_leader(self, leader: int) -> Callable[[], None]:
        self.lighthouses[leader].signal(signal.SIGSTOP)

        def resume() -> None:
            time.sleep(self.random.uniform(0, 2))
            self.lighthouses[leader].signal(signal.SIGCONT)
            time.sleep(SETTLED_S)

        return resume

    def cut_leader(self, leader: int) -> Callable[[], None]:
        for proxy in self._proxies[leader]:
            proxy.hush()

        def mend() -> None:
            for proxy, node in zip(self._proxies[leader], self.etcd.nodes, strict=True):
                proxy.forward(node.port)
            time.sleep(SETTLED_S)

        return mend

    def kill_node(self, leader: int) -> Callable[[], None]:
        node = self.random.choice(self.etcd.nodes)
        node.kill()

        def start() -> None:
            node.start()
            self.etcd.wait()

        return start

    def kill_both(self, leader: int) -> Callable[[], None]:
        for lighthouse in self.lighthouses:
            lighthouse.kill()
        self.restart(0)
        self.restart(1)
        return lambda: None

    def end_leader(self, leader: int) -> Callable[[], None]:
        assert self.lighthouses[leader].stop() == 0
        return lambda: self.restart(leader)


KINDS: dict[str, Callable[[Cluster, int], Callable[[], None]]] = {
    "kill -9": Cluster.kill_leader,
    "SIGSTOP": Cluster.stop_leader,
    "cut from etcd": Cluster.cut_leader,
    "kill an etcd node": Cluster.kill_node,
    "kill both": Cluster.kill_both,
    "stop gracefully": Cluster.end_leader,
}


class Gaps:
    """The longest time without a commit of any group since the last reset. A context manager."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gaps")
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        join([self._thread])

    def reset(self) -> None:
        self.longest_s = 0.0

    def _watch(self) -> None:
        counts, since = [0] * len(self._groups), [time.monotonic()] * len(self._groups)
        while not self._is_over.wait(0.01):
            now = time.monotonic()
            for i, group in enumerate(self._groups):
                self.longest_s = max(self.longest_s, now - since[i])
                if len(group.commits) != counts[i]:
                    counts[i], since[i] = len(group.commits), now


def check(cluster: Cluster) -> History:
    """All that must hold, whatever has happened; by the records of all sides."""
    check_speakers(cluster.witness.said)
    history = read_history(cluster.etcd, cluster.prefix)
    for group in cluster.groups:
        steps = [step for step, _ in group.commits]
        # One that has discarded a step which the others have committed heals, and is a step further.
        expected = sorted(set(steps)) if group.discards else list(range(steps[0], steps[0] + len(steps)))
        assert steps == expected, f"{group.name} has done a step twice, or left one out"
        ids = [quorum_id for _, quorum_id in group.commits]
        assert ids == sorted(ids), f"{group.name} went back to an older quorum"
        assert set(ids) <= set(history.lists), f"{group.name} has trained under {set(ids) - set(history.lists)}"
    return history


def check_bars(cluster: Cluster) -> None:
    """What is promised where the lease is longer than a failover."""
    late = [f for f in cluster.faults if f.name in FAILS_OVER and (f.failover_s or 0.0) > FAILOVER_S]
    assert not late, f"failovers that took longer than {FAILOVER_S:g} s: {late}"
    lost = [fault for fault in cluster.faults if fault.discards]
    assert not lost, f"a step was lost: {lost}"


FAILS_OVER = ("kill -9", "SIGSTOP", "cut from etcd", "stop gracefully")


def run(faults: int, seed: int, tell: Callable[[str], None] = lambda text: None) -> Iterator[Cluster]:
    """Faults in a row, each kind as often as the others; yields when all are done."""
    with Cluster(seed) as cluster:
        for number in range(faults):
            fault = cluster.strike(list(KINDS)[number % len(KINDS)])
            over = "same leader" if fault.failover_s is None else f"led again after {fault.failover_s:.2f} s"
            tell(
                f"{number + 1:4d} {fault.name:<18} {over}; longest step {fault.longest_s:.2f} s; {fault.discards} lost"
            )
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.failover", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for cluster in run(options.faults, options.seed, lambda text: print(text, flush=True)):
        history = check(cluster)
        print(f"{'fault':<18} {'count':>5} {'failover, median':>17} {'max':>8} {'longest step':>13} {'discarded':>10}")
        for name, count in Counter(fault.name for fault in cluster.faults).items():
            mine = [fault for fault in cluster.faults if fault.name == name]
            took = sorted(fault.failover_s for fault in mine if fault.failover_s is not None)
            median, most = (f"{took[len(took) // 2]:.2f} s", f"{took[-1]:.2f} s") if took else ("-", "-")
            longest, lost = max(fault.longest_s for fault in mine), sum(fault.discards for fault in mine)
            print(f"{name:<18} {count:>5} {median:>17} {most:>8} {longest:>11.2f} s {lost:>10}")
        said = len(cluster.witness.said)
        print(
            f"{len(history.terms)} terms, {history.writes} guarded writes, {len(history.lists)} quorum ids, each of "
            f"one list; {said} answers to the witness, none of a deposed lighthouse; {cluster.visits} visits; "
            f"{sum(len(group.commits) for group in cluster.groups)} commits"
        )
        check_bars(cluster)
    return 0


if __name__ == "__main__":
    sys.exit(main())
