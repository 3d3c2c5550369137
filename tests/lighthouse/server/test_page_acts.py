"""What the page asks for reaches the handlers of the RPCs as their requests, and the audit has how each act ended."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from lighthouse.server.page_acts import page_acts
from lighthouse_protocol.limits import JOB_METADATA_KEY, RUN_METADATA_KEY
from lighthouse_protocol.messages.incident import Gathered
from lighthouse_protocol.refusals import UnknownName
from lighthouse_protocol.rules.access import POLICY, Principal, Role, is_control
from lighthouse_runtime.security.access import Audit
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.web.control import Act, Order

Acts = Mapping[str, Act]
CALL = Call(10.0, "ipv4:10.0.0.1:5", {"other": "kept"}, Principal("token op", frozenset({Role.OPERATE})))


class Services:
    """`asked`: what each handler was given; `refusal`: how it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.refusal: Exception | None = None

    async def kill(self, request: Any, call: Call) -> None:
        self._take("kill", request.job, request.replica_id, request.msg)

    async def drain(self, request: Any, call: Call) -> None:
        self._take("drain", request.job, request.replica_id, request.msg)

    async def stop_run(self, request: Any, call: Call) -> None:
        self._take("stop", call.metadata[JOB_METADATA_KEY], call.metadata[RUN_METADATA_KEY], request.reason)

    async def resume_run(self, request: Any, call: Call) -> None:
        self._take("resume", call.metadata[JOB_METADATA_KEY], call.metadata[RUN_METADATA_KEY], call.metadata["other"])

    async def gather(self, job: str, ranks: Iterable[str], call: Call) -> Gathered:
        self._take("stacks", job, *ranks)
        return Gathered(missing=("b: gave none",))

    def _take(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture
def audited(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def acts(services: Services, audited: Path) -> Acts:
    asked = cast("Any", services)
    return page_acts(asked, asked, asked, Audit(audited))


def entries(audited: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audited.read_text().splitlines()]


@pytest.mark.parametrize(
    ("route", "order", "asked", "answer"),
    [
        ("kill", Order("j", "a", reason="x"), ("j", "a", "x"), {"job": "j", "replica_id": "a", "killed": True}),
        ("drain", Order("j", "a", reason="x"), ("j", "a", "x"), {"job": "j", "replica_id": "a", "draining": True}),
        ("stop", Order("j", run="r", reason="x"), ("j", "r", "x"), {"job": "j", "run": "r", "stopped": True}),
        ("resume", Order("j", run="r"), ("j", "r", "kept"), {"job": "j", "run": "r", "resumed": True}),
        ("stacks", Order("j"), ("j",), {"evidence": [], "missing": ["b: gave none"]}),
        ("stacks", Order("j", "a/1"), ("j", "a/1"), {"evidence": [], "missing": ["b: gave none"]}),
    ],
)
async def test_each_asks_the_handler_of_its_rpc(
    acts: Acts,
    services: Services,
    route: str,
    order: Order,
    asked: tuple[str, ...],
    answer: dict[str, object],
):
    assert await acts[f"POST /{route}"](order, CALL) == answer
    assert services.asked == [(route, *asked)]


async def test_the_audit_has_each_act_and_how_it_ended(acts: Acts, services: Services, audited: Path):
    await acts["POST /drain"](Order("j", "a", reason="repair"), CALL)
    services.refusal = UnknownName("run: there is no r")
    with pytest.raises(UnknownName):
        await acts["POST /stop"](Order("j", run="r"), CALL)
    services.refusal = None
    await acts["POST /stacks"](Order("j"), CALL)
    lines = entries(audited)
    assert len(lines) == 2, "stacks change nothing"
    assert (lines[0]["what"], lines[0]["target"]) == ("POST /drain", "job=j, replica_id=a, msg=repair")
    assert (lines[0]["result"], lines[1]["result"]) == ("done", "refused: run: there is no r")
    assert "run=r" in lines[1]["target"]


def test_each_needs_an_operator(acts: Acts):
    assert acts
    assert all(is_control(route) for route in acts)
    assert {route for route in POLICY if route.startswith("POST ")} - {"POST /login", "POST /preemption"} == set(acts)
