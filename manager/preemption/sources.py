"""Sources of preemption notices: cloud metadata services, signals, a file, and the manager's HTTP hook.

Each source reads one kind of answer. An answer that a source cannot read is an error, never the absence of a notice: a
metadata service may answer late, with an error page or not at all, and a notice that was seen before stays valid. Only
a well-formed answer without a notice withdraws it.
"""

import asyncio
import email.utils
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import aiohttp

from lighthouse_protocol.limits import MAX_SECONDS
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.log_event import event
from lighthouse_runtime.timing.pacing import start_read

log = logging.getLogger(__name__)

METADATA_ENDPOINT = "http://169.254.169.254"
MAX_ANSWER_BYTES = 64 * 1024
EVERY_S = 2.0
"""Time between two requests. AWS recommends at most 5 s, and Azure 1 s."""
ANSWERS_WITHIN_S = 5.0
GCP_WAITS_S = 20
"""How long GCP's metadata server keeps a request open until the value changes."""
GCP_NOTICE_S = 30.0
"""Time from `preempted` to the end of the machine, according to GCP's documentation."""
TOKEN_TTL_S = 6 * 3600
MAX_LEFT_S = 1e6
MAX_SLURM_NOTICE_S = 3600.0

AWS, GCP, AZURE, SLURM, KUBERNETES, FILE, HTTP = "aws", "gcp", "azure", "slurm", "kubernetes", "file", "http"
NAMES = ("auto", AWS, GCP, AZURE, SLURM, KUBERNETES)

OnNotice = Callable[[str, PreemptionNotice | None], object]
"""Callback that receives the name of a source, and its current notice or None."""


class Source(Protocol):
    """A source that is polled. `poll` returns its current notice or None, or raises one of POLL_ERRORS."""

    name: str

    async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None: ...


# RuntimeError is raised if no thread can be started, for example at a limit of the number of processes.
POLL_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError, OverflowError, RuntimeError)


class Answer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]


async def fetch(http: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str]) -> Answer:
    """Send an HTTP request, without following redirects. Raise ValueError if the answer exceeds MAX_ANSWER_BYTES."""
    async with http.request(method, url, headers=headers, allow_redirects=False) as response:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes")
        return Answer(response.status, body.decode(errors="replace"), response.headers)


def _checked(answer: Answer, url: str) -> str:
    if answer.status != 200:
        raise ValueError(f"{url} answered with status {answer.status}")
    return answer.text


def _json_object(text: str, url: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{url} answered with {text[:40]!r}, which is not a JSON object")
    return value


def _unix_time(text: object) -> float:
    """Parse a time into Unix seconds. Raise ValueError if it is invalid.

    AWS sends, for example, 2026-09-18T08:22:00Z, and Azure Mon, 19 Sep 2026 18:29:47 GMT.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a time")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = email.utils.parsedate_to_datetime(text)
    seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{text!r} is not a time of this century")
    return seconds


class Aws:
    """Source on AWS: the spot instance action and the rebalance recommendation, read with IMDSv2 tokens."""

    name = AWS

    def __init__(self, endpoint: str) -> None:
        self._root = f"{endpoint}/latest"
        self._token = ""

    async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None:
        if (text := await self._get(http, "meta-data/spot/instance-action")) is not None:
            action = _json_object(text, "instance-action")
            reason = f"spot instance: {action.get('action')}"
            return PreemptionNotice(AWS, reason, socket.gethostname(), _unix_time(action.get("time")))
        if (text := await self._get(http, "meta-data/events/recommendations/rebalance")) is not None:
            _unix_time(_json_object(text, "rebalance").get("noticeTime"))
            return PreemptionNotice(AWS, "rebalance recommendation", socket.gethostname(), is_advice=True)
        return None

    async def _get(self, http: aiohttp.ClientSession, path: str) -> str | None:
        """Return the metadata value at `path`, or None if it does not exist. Replace an expired token once."""
        url = f"{self._root}/{path}"
        answer = await self._get_with_token(http, url) if self._token else None
        if answer is None or answer.status == 401:
            self._token = await self._new_token(http)
            answer = await self._get_with_token(http, url)
        return None if answer.status == 404 else _checked(answer, url)

    async def _get_with_token(self, http: aiohttp.ClientSession, url: str) -> Answer:
        return await fetch(http, "GET", url, {"X-aws-ec2-metadata-token": self._token})

    async def _new_token(self, http: aiohttp.ClientSession) -> str:
        url = f"{self._root}/api/token"
        answer = await fetch(http, "PUT", url, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        token = _checked(answer, url).strip()
        if not token or len(token) > 1024 or not token.isascii() or not token.isprintable() or "<" in token:
            raise ValueError(f"{url} answered with {token[:40]!r}, which is not a token")
        return token


class Gcp:
    """Source on GCP: the metadata value `instance/preempted`.

    After the first answer, the server keeps each request open until the value changes, for at most GCP_WAITS_S.
    """

    name = GCP

    def __init__(self, endpoint: str) -> None:
        self._url = f"{endpoint}/computeMetadata/v1/instance/preempted"
        self._etag = ""
        self._notice: PreemptionNotice | None = None

    async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None:
        wait = f"?wait_for_change=true&timeout_sec={GCP_WAITS_S}&last_etag={self._etag}" if self._etag else ""
        answer = await fetch(http, "GET", self._url + wait, {"Metadata-Flavor": "Google"})
        value = _checked(answer, self._url).strip().upper()
        if answer.headers.get("Metadata-Flavor") != "Google" or value not in ("TRUE", "FALSE"):
            raise ValueError(f"{self._url} answered with {value[:40]!r} instead of TRUE or FALSE")
        etag = answer.headers.get("ETag", "")
        self._etag = etag if etag.isalnum() else ""
        if value == "FALSE":
            self._notice = None
        elif self._notice is None:
            ends_at = datetime.now(UTC).timestamp() + GCP_NOTICE_S
            self._notice = PreemptionNotice(GCP, "the instance is preempted", socket.gethostname(), ends_at)
        return self._notice


class Azure:
    """Source on Azure: Scheduled Events of type Preempt or Terminate that name this machine."""

    name = AZURE

    def __init__(self, endpoint: str) -> None:
        self._root = f"{endpoint}/metadata"
        self._machine = ""

    async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None:
        headers = {"Metadata": "true"}
        if not self._machine:
            url = f"{self._root}/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = _checked(await fetch(http, "GET", url, headers), url).strip()
        url = f"{self._root}/scheduledevents?api-version=2020-07-01"
        events = _json_object(_checked(await fetch(http, "GET", url, headers), url), url).get("Events")
        if not isinstance(events, list):
            raise ValueError(f"{url} answered without a list of events")
        found = [each for each in events if _is_end_of(each, self._machine)]
        ends = [_unix_time(each["NotBefore"]) if each.get("NotBefore") else None for each in found]
        if not found:
            return None
        first = min(range(len(found)), key=lambda place: ends[place] or 0.0)  # an event without a time has started
        return PreemptionNotice(AZURE, f"scheduled event {found[first]['EventType']}", self._machine, ends[first])


def _is_end_of(scheduled: object, machine: str) -> bool:
    """Return whether a scheduled event ends `machine`. Azure also lists the events of other machines."""
    if not isinstance(scheduled, dict) or not isinstance(scheduled.get("Resources"), list):
        raise ValueError(f"{scheduled!r} is not a scheduled event")
    return scheduled.get("EventType") in ("Preempt", "Terminate") and machine in scheduled["Resources"]


class File:
    """Source that reports a preemption notice while a file exists.

    The file may contain the number of seconds until the host is taken away, counted from the file's last change, and
    then a reason.
    """

    def __init__(self, path: Path) -> None:
        self.name = f"{FILE}={path}"  # includes the path, because there may be several files
        self._path = path
        self._reading: Future[PreemptionNotice | None] | None = None

    async def poll(self, http: aiohttp.ClientSession) -> PreemptionNotice | None:
        # A network file system may not answer. The next poll then waits for the same read.
        reading = self._reading = self._reading or start_read("preemption", self._read)
        try:
            return await asyncio.wrap_future(reading)
        finally:
            if reading.done():
                self._reading = None

    def _read(self) -> PreemptionNotice | None:
        try:
            with self._path.open(errors="replace") as file:
                text, written_at = file.read(1024), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        first, _, rest = text.strip().partition(" ")
        try:
            seconds = float(first)
        except ValueError:
            seconds, rest = None, text.strip()
        ends_at = written_at + seconds if seconds is not None and 0 <= seconds <= MAX_LEFT_S else None
        if ends_at is not None and not 0 <= ends_at <= MAX_SECONDS:  # the clock of the file's host is wrong
            ends_at = None
        reason = rest.partition("\n")[0] or f"{self._path} exists"
        return PreemptionNotice(FILE, reason, socket.gethostname(), ends_at)


def read_posted(body: Mapping[str, object], now_unix_s: float, host: str) -> PreemptionNotice | None:
    """Parse the body of POST /preemption, or raise InvalidRequest. Return None if the body withdraws a notice.

    `now_unix_s` is the time of the request, and `host` the name of the host that will be preempted.
    """
    seconds, reason, is_withdrawn = body.get("seconds"), body.get("reason", ""), body.get("withdrawn", False)
    if unknown := body.keys() - {"seconds", "reason", "withdrawn"}:
        raise InvalidRequest(f"unknown fields {sorted(unknown)}; use seconds, reason and withdrawn", field="body")
    if not isinstance(is_withdrawn, bool):
        raise InvalidRequest("must be true or false", field="withdrawn")
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float)):
        raise InvalidRequest("must be a number", field="seconds")
    if seconds is not None and not 0 <= seconds <= MAX_LEFT_S:
        raise InvalidRequest(f"{seconds}; must be from 0 to {MAX_LEFT_S:g}", field="seconds")
    if not isinstance(reason, str):
        raise InvalidRequest("must be a string", field="reason")
    if is_withdrawn:
        return None
    return PreemptionNotice(HTTP, reason or "POST /preemption", host, None if seconds is None else now_unix_s + seconds)


def read_signal(
    number: int, used: Collection[str], environ: Mapping[str, str], now_unix_s: float, grace_s: float
) -> PreemptionNotice | None:
    """Return the preemption notice for a signal that the supervisor received, or None if it is not a notice.

    It is a notice only if its sender is in `used`. Kubernetes sends SIGTERM `grace_s` seconds before it kills the pod.
    Slurm sends SIGTERM, or SIGUSR1 with `--signal`, before the job ends at SLURM_JOB_END_TIME. If that time is unknown,
    past or more than MAX_SLURM_NOTICE_S away, the signal announces a preemption, and `grace_s` seconds are left.
    """
    name, host = signal.Signals(number).name, socket.gethostname()
    if number == signal.SIGTERM and KUBERNETES in used:
        return PreemptionNotice(KUBERNETES, f"{name}: the pod ends", host, now_unix_s + grace_s)
    if number not in (signal.SIGTERM, signal.SIGUSR1) or SLURM not in used:
        return None
    end = environ.get("SLURM_JOB_END_TIME", "")
    left_s = float(end) - now_unix_s if end.isdecimal() and len(end) <= 10 else grace_s
    left_s = left_s if 0 <= left_s <= MAX_SLURM_NOTICE_S else grace_s
    return PreemptionNotice(SLURM, f"{name}: the job ends", host, now_unix_s + left_s)


_DMI = Path("/sys/class/dmi/id")
_DMI_FILES = ("sys_vendor", "product_name", "bios_vendor", "chassis_asset_tag")
_CLOUDS = {AWS: ("Amazon EC2",), GCP: ("Google", "Google Compute Engine"), AZURE: ("7783-7084-3265-9085-8269-3286-77",)}


def detect(environ: Mapping[str, str], folder: Path = _DMI) -> tuple[str, ...]:
    """Detect this host's sources of preemption notices, without sending requests.

    The firmware tables in `folder` identify AWS, GCP and Azure, and `environ` identifies Kubernetes.
    Slurm's signal is never detected, because only the user knows what the job's warning signal is for.
    """
    words: set[str] = set()
    for name in _DMI_FILES:
        try:
            words.add((folder / name).read_text(errors="replace").strip())
        except OSError:
            continue
    clouds = tuple(cloud for cloud, signs in _CLOUDS.items() if words.intersection(signs))
    return (*clouds, KUBERNETES) if environ.get("KUBERNETES_SERVICE_HOST") else clouds


def parse_sources(text: str) -> tuple[str, ...]:
    """Parse the value of --preemption into names, such as `aws` and `file=PATH`. Raise ValueError if it is invalid."""
    if text.strip() == "off":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in NAMES and not (name.startswith(f"{FILE}=") and len(name) > len(f"{FILE}=")):
            known = f"{', '.join(NAMES)} and file=PATH"
            raise ValueError(f"--preemption {text}: {name!r} is not a source; use off alone, or a list of {known}")
    return names


def chosen_sources(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sources in the value of --preemption, with `auto` replaced by the detected ones."""
    names = [name for part in parse_sources(text) for name in (detect(environ) if part == "auto" else (part,))]
    return tuple(dict.fromkeys(names))


def polled_sources(names: Collection[str], endpoint: str) -> list[Source]:
    clouds: Mapping[str, Callable[[str], Source]] = {AWS: Aws, GCP: Gcp, AZURE: Azure}
    polled = [clouds[name](endpoint) for name in names if name in clouds]
    return [*polled, *(File(Path(name.partition("=")[2])) for name in names if name.startswith(f"{FILE}="))]


async def follow(source: Source, on_notice: OnNotice, every_s: float = EVERY_S) -> None:
    """Poll a source until cancelled, at intervals of `every_s` seconds, and pass its notice or None to `on_notice`.

    Log when the source begins to fail, and when it works again.
    """
    has_failed = False
    within_s = ANSWERS_WITHIN_S + (GCP_WAITS_S if source.name == GCP else 0)
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with asyncio.timeout(within_s):
                    notice = await source.poll(http)
                on_notice(source.name, notice)
                if has_failed:
                    fields = event("preemption_source_back")
                    log.info("preemption notices from %s can be read again", source.name, extra=fields)
                has_failed = False
            except POLL_ERRORS as e:
                if not has_failed:
                    why = f"it has not answered within {within_s:g} s" if isinstance(e, TimeoutError) else str(e)
                    fields = event("preemption_source_failed", source=source.name)
                    text = "cannot read preemption notices from %s, retrying every %g s: %s"
                    log.info(text, source.name, every_s, why or type(e).__name__, extra=fields)
                has_failed = True
            await asyncio.sleep(every_s)
