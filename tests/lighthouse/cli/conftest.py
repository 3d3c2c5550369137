import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import click
import pytest
from click.testing import CliRunner, Result

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.run import KeyKind, RunStatus
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client import clients
from tests.lighthouse.statuses import status

Answer = LighthouseStatus | BaseException


@contextmanager
def unreadable(folder: Path) -> Generator[None, None, None]:
    """Take this user's permissions for `folder`. Root has them all, so root is another user meanwhile."""
    is_root = os.geteuid() == 0
    folder.chmod(0)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


@dataclass
class FakeLighthouse:
    """Answers in turn, the last answer for ever; `calls` has what was asked."""

    answers: list[Answer] = field(default_factory=lambda: [status()])
    calls: list[dict[str, object]] = field(default_factory=list)
    runs: list[RunStatus] = field(default_factory=list)
    keys: dict[tuple[KeyKind, str], bytes] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    gathered: Gathered = field(default_factory=Gathered)
    ledger: list[str] = field(default_factory=list)
    page_lines: int = 1000

    def answer(self, **asked: object) -> LighthouseStatus:
        self.calls.append(asked)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


class FakeClient:
    def __init__(self, fake: FakeLighthouse, coordinator: Coordinator, job: str, run: str) -> None:
        self._fake = fake
        self._run = run
        self._who = {"address": str(coordinator), "job": job}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def status(self, job: str = "", *, ranks: bool = False, timeout_s: float = 5.0) -> LighthouseStatus:
        asked = {"ranks": True} if ranks else {}
        return self._fake.answer(address=self._who["address"], job=job, timeout_s=timeout_s, **asked)

    def kill(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        self._fake.answer(**self._who, replica_id=replica_id, msg=msg, timeout_s=timeout_s)

    def drain(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        self._fake.answer(**self._who, verb="drain", replica_id=replica_id, msg=msg, timeout_s=timeout_s)

    def runs(self, run: str = "", *, timeout_s: float = 5.0) -> tuple[RunStatus, ...]:
        self._fake.answer(verb="runs", run=run)
        return tuple(found for found in self._fake.runs if run in ("", found.run))

    def get_keys(
        self, *, of: int | None = None, timeout_s: float = 5.0
    ) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
        self._fake.answer(verb="keys", run=self._run, **({} if of is None else {"of": of}))
        return 7, self._fake.keys

    def stop_run(self, reason: str, *, timeout_s: float = 10.0) -> None:
        self._fake.answer(**self._who, verb="stop", run=self._run, reason=reason)

    def resume_run(self, *, timeout_s: float = 10.0) -> None:
        self._fake.answer(**self._who, verb="resume", run=self._run)

    def incidents(self, job: str = "", *, timeout_s: float = 5.0) -> tuple[IncidentSummary, ...]:
        self._fake.answer(verb="incidents", job=job)
        return tuple(incident.summary for incident in self._fake.incidents)

    def incident(self, id: str, *, timeout_s: float = 10.0) -> Incident:
        self._fake.answer(**self._who, verb="incident", id=id)
        return self._fake.incidents[0]

    def ledger(self, page: str = "", job: str = "", *, timeout_s: float = 5.0) -> tuple[tuple[str, ...], str]:
        self._fake.answer(address=self._who["address"], verb="ledger", page=page, job=job)
        at, size = int(page.partition(":")[2] or 0), self._fake.page_lines
        following = f"{page[:8] or '20260920'}:{at + size}" if at + size < len(self._fake.ledger) else ""
        return tuple(self._fake.ledger[at : at + size]), following

    def stacks(self, ranks: Sequence[str] = (), *, timeout_s: float = 15.0) -> Gathered:
        self._fake.answer(**self._who, verb="stacks", ranks=tuple(ranks), timeout_s=timeout_s)
        return self._fake.gathered


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLighthouse:
    fake = FakeLighthouse()

    def client(coordinator: Coordinator, *, role: Role, job: str = "default", run: str = "default") -> FakeClient:
        assert role in (Role.OPERATE, Role.CHAOS)
        return FakeClient(fake, coordinator, job, run)

    monkeypatch.setattr(clients, "LighthouseClient", client)
    for variable in ("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    return fake


@pytest.fixture
def run(fake: FakeLighthouse) -> Callable[..., Result]:
    def run(command: click.Command, *args: str, env: dict[str, str] | None = None, typed: str | None = None) -> Result:
        return CliRunner().invoke(command, args, input=typed, env=env, catch_exceptions=False)

    return run
