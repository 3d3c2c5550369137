import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.refusals import InvalidRequest
from manager.preemption import sources
from manager.preemption.sources import (
    POLL_ERRORS,
    Aws,
    Azure,
    File,
    Gcp,
    Source,
    chosen_sources,
    detect,
    follow,
    parse_sources,
    polled_sources,
    read_posted,
    read_signal,
)
from tests.manager.preemption.fake_metadata import Metadata, serving

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"
HOST = socket.gethostname()
AT = 1_789_712_520.0  # 2026-09-18T06:22:00Z


async def reached(look: Callable[[], bool]) -> None:
    while not look():  # noqa: ASYNC110 - the service and the log have no event
        await asyncio.sleep(0.002)


@pytest.fixture
async def metadata() -> AsyncGenerator[Metadata]:
    async with serving() as metadata:
        metadata.set(NAME, "vm-1")
        metadata.set(EVENTS, scheduled())
        yield metadata


@pytest.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def scheduled(*events: Mapping[str, Any]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": events})


def event(kind: str = "Preempt", *machines: str, at: str = "Fri, 18 Sep 2026 06:22:00 GMT") -> Mapping[str, Any]:
    return {"EventType": kind, "Resources": list(machines or ["vm-1"]), "NotBefore": at, "EventStatus": "Scheduled"}


async def test_aws_tells_the_action_and_a_rebalance_is_advice(metadata: Metadata, http: aiohttp.ClientSession) -> None:
    aws = Aws(metadata.url)
    assert await aws.poll(http) is None
    metadata.set(REBALANCE, '{"noticeTime": "2026-09-18T06:20:00Z"}')
    assert await aws.poll(http) == PreemptionNotice("aws", "rebalance recommendation", HOST, is_advice=True)
    metadata.set(ACTION, '{"action": "terminate", "time": "2026-09-18T06:22:00Z"}')
    assert await aws.poll(http) == PreemptionNotice("aws", "spot instance: terminate", HOST, AT)
    assert metadata.tokens_given == 1
    metadata.set(ACTION, None)
    metadata.set(REBALANCE, None)
    assert await aws.poll(http) is None


async def test_an_expired_token_is_replaced(metadata: Metadata, http: aiohttp.ClientSession) -> None:
    aws = Aws(metadata.url)
    assert await aws.poll(http) is None
    metadata.token = "token-2"
    metadata.set(ACTION, '{"action": "stop", "time": "2026-09-18T06:22:00Z"}')
    assert await aws.poll(http) == PreemptionNotice("aws", "spot instance: stop", HOST, AT)
    assert metadata.tokens_given == 2


async def test_gcp_answers_when_the_value_changes(metadata: Metadata, http: aiohttp.ClientSession) -> None:
    gcp = Gcp(metadata.url)
    assert await gcp.poll(http) is None
    waiting = asyncio.create_task(gcp.poll(http))
    await reached(lambda: metadata.requests.count(f"GET {PREEMPTED}") == 2)
    assert not waiting.done()
    before = time.time()
    metadata.set(PREEMPTED, "TRUE")
    notice = await waiting
    assert notice is not None
    assert notice.ends_at_unix_s is not None
    assert before + 30 <= notice.ends_at_unix_s <= time.time() + 30


async def test_azure_names_the_machines_that_end(metadata: Metadata, http: aiohttp.ClientSession) -> None:
    azure = Azure(metadata.url)
    metadata.set(EVENTS, scheduled(event("Reboot"), event("Preempt", "vm-2")))
    assert await azure.poll(http) is None
    metadata.set(
        EVENTS, scheduled(event("Terminate", at="Fri, 18 Sep 2026 07:22:00 GMT"), event("Preempt", "vm-0", "vm-1"))
    )
    assert await azure.poll(http) == PreemptionNotice("azure", "scheduled event Preempt", "vm-1", AT)
    metadata.set(EVENTS, scheduled(event(at="")))
    assert await azure.poll(http) == PreemptionNotice("azure", "scheduled event Preempt", "vm-1")
    metadata.set(EVENTS, scheduled())
    assert await azure.poll(http) is None


@pytest.mark.parametrize("broken", ["html", "truncated", "500", "redirect", "endless", "no-flavor"])
@pytest.mark.parametrize("kind", [Aws, Gcp, Azure])
async def test_a_wrong_answer_is_neither_a_notice_nor_its_absence(
    metadata: Metadata, http: aiohttp.ClientSession, kind: type[Any], broken: str
) -> None:
    if broken == "no-flavor" and kind is not Gcp:
        pytest.skip("only GCP sends this header")
    metadata.set(ACTION, '{"action": "terminate", "time": "2026-09-18T06:22:00Z"}')
    metadata.set(EVENTS, scheduled(event()))
    metadata.set(PREEMPTED, "TRUE")
    source = kind(metadata.url)
    assert await source.poll(http) is not None
    metadata.broken = broken
    with pytest.raises(POLL_ERRORS):
        await kind(metadata.url).poll(http)
    if kind is not Gcp or broken != "truncated":
        with pytest.raises(POLL_ERRORS):
            await asyncio.wait_for(source.poll(http), 5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ACTION, '{"action": "terminate"}'),
        (ACTION, '{"action": "terminate", "time": "soon"}'),
        (ACTION, '{"action": "terminate", "time": "9999-12-31T23:59:59Z"}'),
        (ACTION, "[" * 60_000),
        (REBALANCE, "{}"),
        (EVENTS, '{"Events": {}}'),
        (EVENTS, '{"Events": [1]}'),
        (EVENTS, scheduled(event(at="tomorrow"))),
        (PREEMPTED, "MAYBE"),
    ],
)
async def test_so_is_an_answer_without_sense(metadata: Metadata, http: aiohttp.ClientSession, path: str, body: str):
    metadata.set(path, body)
    kind = Aws if path.startswith("/latest") else Azure if path.startswith("/metadata") else Gcp
    with pytest.raises(POLL_ERRORS):
        await kind(metadata.url).poll(http)


class Recorder:
    def __init__(self) -> None:
        self.notices: list[PreemptionNotice | None] = []

    def __call__(self, source: str, notice: PreemptionNotice | None) -> None:
        if not self.notices or self.notices[-1] != notice:
            self.notices.append(notice)

    async def until(self, *ends: bool) -> None:
        """Wait until these have come: whether each is a notice."""
        await reached(lambda: [each is not None for each in self.notices] == list(ends))


async def test_a_notice_outlives_a_service_that_fails_and_each_failure_is_logged_once(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "ANSWERS_WITHIN_S", 0.2)
    caplog.set_level(logging.INFO)
    recorder = Recorder()
    task = asyncio.create_task(follow(Aws(metadata.url), recorder, every_s=0.001))
    async with asyncio.timeout(60):
        await recorder.until(False)
        metadata.set(ACTION, '{"action": "terminate", "time": "2026-09-18T06:22:00Z"}')
        await recorder.until(False, True)
        for broken in ("500", "never"):
            metadata.broken = broken
            count = len(metadata.requests)
            await reached(lambda count=count: len(metadata.requests) >= count + 3)
        assert len(recorder.notices) == 2
        metadata.broken = ""
        metadata.set(ACTION, None)
        await recorder.until(False, True, False)
    task.cancel()
    lines = [record.getMessage() for record in caplog.records if "notices from aws" in record.getMessage()]
    assert [line.split()[0] for line in lines] == ["cannot", "preemption"]
    assert "answered with status 500" in lines[0]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_where_no_service_answers_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    polls: list[str] = []

    class Absent(Azure):
        async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None:
            polls.append(self.name)
            return await super().poll(http)

    task = asyncio.create_task(follow(Absent("http://127.0.0.1:1"), Recorder(), every_s=0.001))
    async with asyncio.timeout(60):
        await reached(lambda: len(polls) > 3)
    task.cancel()
    assert [record.levelno for record in caplog.records] == [logging.INFO]


async def test_a_file_that_cannot_be_read_takes_one_thread_that_delays_no_exit(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """As on a network file system that does not answer: here a pipe that nobody writes to."""
    path, before = tmp_path / "notice", set(threading.enumerate())
    os.mkfifo(path)
    source = File(path)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await source.poll(http)
    [reading] = set(threading.enumerate()) - before
    assert reading.daemon
    polled = asyncio.create_task(source.poll(http))
    with path.open("w") as writer:
        writer.write("the rack")
    assert (await polled).reason == "the rack"
    path.unlink()
    assert await source.poll(http) is None


async def test_a_file_is_followed_although_no_thread_can_be_started_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tries = threading.Thread.start, 0

    def at_the_limit(thread: threading.Thread) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", at_the_limit)
    (tmp_path / "notice").touch()
    recorder = Recorder()
    task = asyncio.create_task(follow(File(tmp_path / "notice"), recorder, every_s=0.001))
    async with asyncio.timeout(60):
        await recorder.until(True)
    task.cancel()


async def test_a_file_tells_the_time_left_since_it_was_written(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    path = tmp_path / "notice"
    source = File(path)
    assert await source.poll(http) is None
    path.touch()
    assert await source.poll(http) == PreemptionNotice("file", f"{path} exists", HOST)
    path.write_text("90 the rack is repaired\nmore\n")
    os.utime(path, (AT, AT))
    assert await source.poll(http) == PreemptionNotice("file", "the rack is repaired", HOST, AT + 90)
    path.write_text("nan")
    assert await source.poll(http) == PreemptionNotice("file", f"{path} exists", HOST)
    path.write_text("the rack")
    assert await source.poll(http) == PreemptionNotice("file", "the rack", HOST)
    path.unlink()
    path.mkdir()
    with pytest.raises(POLL_ERRORS):
        await source.poll(http)


async def test_a_file_that_is_absent_withdraws_no_notice_of_another(tmp_path: Path) -> None:
    current: dict[str, PreemptionNotice | None] = {}
    polls = 0

    def record(source: str, notice: PreemptionNotice | None) -> None:
        nonlocal polls
        polls, current[source] = polls + 1, notice

    (tmp_path / "there").touch()
    names = parse_sources(f"file={tmp_path / 'there'},file={tmp_path / 'absent'}")
    tasks = [asyncio.create_task(follow(source, record, every_s=0.001)) for source in polled_sources(names, "")]
    async with asyncio.timeout(60):
        await reached(lambda: polls > 6)
    for task in tasks:
        task.cancel()
    assert sorted(notice is not None for notice in current.values()) == [False, True]


def test_the_http_hook_refuses_what_it_does_not_know() -> None:
    assert read_posted({"seconds": 90, "reason": "rack"}, AT, "h") == PreemptionNotice("http", "rack", "h", AT + 90)
    assert read_posted({}, AT, "h") == PreemptionNotice("http", "POST /preemption", "h")
    assert read_posted({"withdrawn": True}, AT, "h") is None
    for body in (
        {"seconds": "90"},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"seconds": True},
        {"reason": 3},
        {"withdrawn": 1},
        {"minutes": 1},
    ):
        with pytest.raises(InvalidRequest):
            read_posted(body, AT, "h")


def test_signals_are_notices_only_where_they_are_chosen() -> None:
    term, usr1, usr2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    slurm = {"SLURM_JOB_END_TIME": str(int(AT) + 120)}
    assert read_signal(term, ("kubernetes",), {}, AT, 30) == PreemptionNotice(
        "kubernetes", "SIGTERM: the pod ends", HOST, AT + 30
    )
    assert read_signal(usr1, ("slurm",), slurm, AT, 30) == PreemptionNotice(
        "slurm", "SIGUSR1: the job ends", HOST, AT + 120
    )
    for end in ("x", "", str(int(AT) + 4000), str(int(AT) - 1), "9" * 400):
        notice = read_signal(term, ("slurm",), {"SLURM_JOB_END_TIME": end}, AT, 30)
        assert notice is not None
        assert notice.ends_at_unix_s == AT + 30, end
    for number, used in ((usr1, ("kubernetes",)), (usr2, ("slurm",)), (term, ())):
        assert read_signal(number, used, slurm, AT, 30) is None


@pytest.mark.parametrize(
    ("vendor", "tag", "found"),
    [
        ("Amazon EC2", "", ("aws",)),
        ("Google", "", ("gcp",)),
        ("Microsoft Corporation", "7783-7084-3265-9085-8269-3286-77", ("azure",)),
        ("Microsoft Corporation", "", ()),  # Hyper-V at home
        ("QEMU", "", ()),
    ],
)
def test_auto_finds_the_cloud_without_a_request(tmp_path: Path, vendor: str, tag: str, found: tuple[str, ...]) -> None:
    (tmp_path / "sys_vendor").write_text(f"{vendor}\n")
    (tmp_path / "chassis_asset_tag").write_text(f"{tag}\n")
    assert detect({}, tmp_path) == found
    assert detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) == (*found, "kubernetes")
    assert detect({"SLURM_JOB_ID": "7"}, tmp_path / "absent") == ()


def test_sources_are_chosen_by_name() -> None:
    assert chosen_sources("off", {}) == ()
    assert chosen_sources("slurm, file=/a/b,slurm", {}) == ("slurm", "file=/a/b")
    polled: list[Source] = polled_sources(("slurm", "aws", "file=/a=b"), "http://h")
    assert [each.name for each in polled] == ["aws", "file=/a=b"]
    for text in ("", "file", "file=", "amazon", "off,aws", "aws,off"):
        with pytest.raises(ValueError, match="--preemption"):
            parse_sources(text)
