"""`lighthouse chaos`: inject faults into a running job, and check that its training survives them.

chaos_plan.py draws the faults and evaluates the result. A fault ends with its call to the lighthouse, so it also ends
when this command exits.
"""

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.text import Text

from lighthouse.cli.chaos_plan import (
    Outcome,
    PlannedFault,
    Target,
    Watcher,
    has_others,
    parse_kinds,
    plan,
    ranks_of,
)
from lighthouse.cli.layout import Column, table
from lighthouse.cli.options import ClientOptions, client_options
from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.messages.chaos import FaultKind
from lighthouse_protocol.messages.status import JobStatus
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    NotPermitted,
    UnknownName,
    Unreachable,
)
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.cli import Duration, format_duration
from lighthouse_runtime.client.clients import AsyncLighthouseClient, LighthouseClient

WATCHED_EVERY_S = 0.25
CALL_MARGIN_S = 15.0
SETTLED_WITHIN_S = 120.0
MAX_SEED = 1 << 32


@click.command()
@click.option("--for", "duration", type=Duration(), default="10m", show_default=True, help="Time to inject faults.")
@click.option("--mtbf", type=Duration(), default="60s", show_default=True, help="Mean time between two faults.")
@click.option(
    "--kinds",
    metavar="KIND,...",
    default=",".join(FaultKind),
    show_default=True,
    help="Kinds of faults to choose from.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the plan, to repeat it.  [default: a new one]")
@click.option(
    "--baseline", type=Duration(), default="30s", show_default=True, help="Time without faults, before the first one."
)
@click.option("--verify", is_flag=True, help="After the faults, wait until all groups have compared their states.")
@click.option("--dry-run", is_flag=True, help="Print the plan and inject nothing.")
@client_options(job_help="Job to act on.  [default: the default job]")
def chaos(
    given: ClientOptions,
    duration: float,
    mtbf: float,
    kinds: str,
    seed: int | None,
    baseline: float,
    verify: bool,
    dry_run: bool,
) -> None:
    """Inject faults into a running job, and check that its training survives them.

    The lighthouse and the managers of all targets must run with --allow-chaos. Ctrl-C ends the faults and prints the
    result so far. Exits with status 1 if states have diverged, a sample was not used exactly once, the job has not
    recovered, or --verify found nothing to compare after a fault.
    """
    seed = random.randrange(MAX_SEED) if seed is None else seed
    try:
        chosen = parse_kinds(kinds)
    except InvalidRequest as e:
        raise click.UsageError(str(e)) from None
    with given.connect(role=Role.CHAOS) as client:
        job = _status(client, given)
        targets = ranks_of(job)
        if not targets:
            raise UnknownName(f"job {given.job_name} has no replica group that trains")
        faults = plan(seed, chosen, mtbf, duration, targets)
        if dry_run:
            return given.show({"seed": seed, "plan": faults}, lambda width: _plan_lines(seed, faults, width))
        click.echo(f"seed {seed}: {len(faults)} faults within {format_duration(duration)}", err=True)
        result = asyncio.run(_Run(given, client, job, verifies=verify).run(faults, baseline, duration))
    given.show({"seed": seed} | result, lambda width: _result_lines(seed, result, width))
    return sys.exit(1 if result["problems"] else 0)


def _status(client: LighthouseClient, given: ClientOptions) -> JobStatus:
    found = client.status(given.job_name, ranks=True, timeout_s=given.timeout).jobs
    if not found:
        raise UnknownName(f"--job {given.job_name}: no such job at {given.address}")
    return found[0]


class _Run:
    """Injects the planned faults and follows the job until it has recovered. `run` returns the result."""

    def __init__(self, given: ClientOptions, client: LighthouseClient, job: JobStatus, *, verifies: bool) -> None:
        self._given = given
        self._client = client
        self._verifies = verifies
        self._watcher = Watcher(job, time.monotonic())
        self._calls: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self, faults: Sequence[PlannedFault], baseline_s: float, duration_s: float) -> dict[str, Any]:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        watcher = self._watcher
        try:
            await asyncio.gather(
                *map(self._check_faults_allowed, sorted({fault.target.replica_id for fault in faults}))
            )
            await self._watch_until(time.monotonic() + baseline_s)
            started_at = time.monotonic()
            watcher.mark(started_at)
            for fault in faults:
                if await self._watch_until(started_at + fault.at_s):
                    break
                self._begin_fault(fault)
            is_stopped = await self._watch_until(started_at + duration_s)
            watcher.mark(time.monotonic())
            if not is_stopped:
                await self._watch_until(time.monotonic() + SETTLED_WITHIN_S, is_settling=True)
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
        return watcher.document(verifies=self._verifies, is_complete=not self._stop.is_set())

    async def _watch_until(self, at: float, *, is_settling: bool = False) -> bool:
        """Poll the job's status until the monotonic time `at`. Return whether SIGINT or SIGTERM has arrived.

        If `is_settling`, return as soon as all faults have ended and the job has recovered (`Watcher.is_settled`).

        Raises:
            LighthouseError: If a fault was not permitted, or the lighthouse has not answered for SETTLED_WITHIN_S.
        """
        answered_at = time.monotonic()
        while not self._stop.is_set() and time.monotonic() < at:
            try:
                self._watcher.update(await asyncio.to_thread(_status, self._client, self._given))
                answered_at = time.monotonic()
            except (Unreachable, DeadlinePassed, UnknownName):  # a restarted lighthouse does not know the job at once
                if time.monotonic() > answered_at + SETTLED_WITHIN_S:
                    raise
            for call in [call for call in self._calls if call.done()]:
                self._calls.discard(call)
                call.result()
            if is_settling and not self._calls and self._watcher.is_settled(verifies=self._verifies):
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.0, min(WATCHED_EVERY_S, at - time.monotonic())))
        return self._stop.is_set()

    def _begin_fault(self, fault: PlannedFault) -> None:
        watcher = self._watcher
        outcome = Outcome(fault, watcher.step)
        if not has_others(watcher.job, fault.target.replica_id, watcher.at_risk):
            outcome.refused = "no other group certainly holds the state"
        else:
            self._calls.add(asyncio.create_task(self._inject(outcome)))
        watcher.outcomes.append(outcome)
        click.echo(f"{fault.at_s:8.1f} s  {fault}" + (f": {outcome.refused}" if outcome.refused else ""), err=True)

    async def _inject(self, outcome: Outcome) -> None:
        fault, target = outcome.fault, outcome.fault.target
        try:
            outcome.incident = await self._call(fault.kind, target, fault.seconds, fault.delay_s)
        except NotPermitted:
            raise
        except LighthouseError as e:  # such as a target that is restarting
            outcome.refused = str(e)

    async def _check_faults_allowed(self, replica_id: str) -> None:
        """Raise LighthouseError if the lighthouse or the manager of group `replica_id` does not allow faults."""
        await self._call(FaultKind.SLOW, Target(replica_id), 0.0, 0.0)

    async def _call(self, kind: FaultKind, target: Target, seconds: float, delay_s: float) -> str:
        coordinator = self._given.coordinator.at(parse_address(self._client.address, "--lighthouse"))
        job, timeout_s = self._given.job_name, seconds + CALL_MARGIN_S
        async with AsyncLighthouseClient(coordinator, job=job, role=Role.CHAOS) as client:
            return await client.inject(
                target.replica_id, kind, target.group_rank, seconds=seconds, delay_s=delay_s, timeout_s=timeout_s
            )


_Row = tuple[str, dict[str, Any]]  # a kind of fault, and the results of its faults
_PLAN_COLUMNS: Sequence[Column[PlannedFault]] = (
    Column("AT", lambda fault: f"{fault.at_s:.1f}s", is_number=True),
    Column("FAULT", str),
)
_RESULT_COLUMNS: Sequence[Column[_Row]] = (
    Column("KIND", lambda row: row[0]),
    Column("FAULTS", lambda row: str(row[1]["faults"]), is_number=True),
    Column("SURVIVED", lambda row: str(row[1]["survived"]), is_number=True),
    Column("NEXT COMMIT", lambda row: _duration(row[1]["next_commit_median_s"]), is_number=True),
    Column("P99", lambda row: _duration(row[1]["next_commit_p99_s"]), is_number=True),
)


def _plan_lines(seed: int, faults: Sequence[PlannedFault], width: int) -> list[Text]:
    return [Text(f"seed {seed}: {len(faults)} faults"), *(table(_PLAN_COLUMNS, faults, width) if faults else ())]


def _result_lines(seed: int, result: dict[str, Any], width: int) -> Iterator[Text]:
    rows = [*result["kinds"].items(), ("all", result["all"])]
    yield from table(_RESULT_COLUMNS, rows, width)
    yield Text()
    base = result["baseline_steps_per_s"]
    goodput = "-" if result["goodput"] is None else f"{result['goodput']:.1%}"
    yield Text(f"goodput   {goodput} of {base:.3g} steps/s without faults, measured before the first fault")
    yield Text(f"repeated  {result['discards']} steps were discarded, counted for each group")
    yield Text(f"states    {result['states_compared']} comparisons seen; equal after {result['verified']} faults")
    yield Text(f"samples   {result['samples'] or 'unknown: the script uses neither StepSampler nor StepLoader'}")
    yield Text(f"seed      {seed}")
    for refused in result["refused"]:
        yield Text(f"not counted: {refused}")
    for problem in result["problems"]:
        yield Text(f"PROBLEM: {problem}", "red")


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}s"
