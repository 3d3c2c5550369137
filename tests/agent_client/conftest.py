"""One interpreter with torch for all tests of the Agent: forking a rank from it takes milliseconds."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agent_client.clusters import PRELOADED
from tests.agent_client.jobs import TIMES, Job
from tests.agent_client.ranks import RankServer, Start
from tests.agent_client.training_jobs import MakeJob, TrainingJob
from tests.processes import Lighthouse

HAS_FAILED = pytest.StashKey[bool]()
LOG_TOLD = 8000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[HAS_FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    with RankServer() as server:
        yield server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What the tests of a test enter, and its end leaves."""
    with ExitStack() as it:
        yield it


@pytest.fixture
def start(rank_server: RankServer, stack: ExitStack) -> Start:
    return lambda count, actor: [stack.enter_context(rank_server.start(actor)) for _ in range(count)]


@pytest.fixture(scope="session")
def forks() -> Iterator[RankServer]:
    """One more, for the examples' own scripts."""
    with RankServer(*PRELOADED) as server:
        yield server


@pytest.fixture(scope="module")
def store(rank_server: RankServer) -> Iterator[str]:
    """The address of a TCPStore in a process of its own."""
    with rank_server.start("tests.agent_client.actors:StoreActor") as host:
        yield host.call("serve")


@pytest.fixture(scope="module")
def lighthouse(request: pytest.FixtureRequest) -> Iterator[Lighthouse]:
    """For all tests of a module, with the TIMES that it may name: each test has a job of its own."""
    with Lighthouse(*getattr(request.module, "TIMES", TIMES)) as process:
        yield process


@pytest.fixture
def job(
    request: pytest.FixtureRequest, lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path
) -> Iterator[Job]:
    """When its test has failed, it prints what the processes wrote."""
    with ExitStack() as own:
        yield Job(lighthouse.address, store, rank_server, tmp_path, own)
    if request.node.stash.get(HAS_FAILED, False):
        for log in sorted(tmp_path.glob("*.log")):
            print(f"-- the end of {log.name}:\n{log.read_text(errors='replace')[-LOG_TOLD:]}")


@pytest.fixture
def make_job(lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path, stack: ExitStack) -> MakeJob:
    def make(actor: type, *, ranks: int = 0, folder: Path = tmp_path, **options: Any) -> TrainingJob:
        named = f"{actor.__module__}:{actor.__name__}"
        at = lighthouse.address, store, rank_server, folder, stack
        return TrainingJob(*at, actor=named, ranks=ranks or getattr(actor, "ranks", 1), **options)

    return make
