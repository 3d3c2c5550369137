"""The job and the member that a request names."""

from lighthouse.members.rules.roster import Member
from lighthouse.quorum.driver import JobDriver
from lighthouse_protocol.limits import DEFAULT_JOB, JOB_METADATA_KEY
from lighthouse_protocol.refusals import UnknownName
from lighthouse_protocol.rules.access import check_bounds
from lighthouse_runtime.server.rpc_handler import Call


def job_named(call: Call) -> str:
    """For what only looks: what a caller is bound to is where it acts."""
    return call.metadata.get(JOB_METADATA_KEY) or DEFAULT_JOB


def job_of(call: Call, named: str = "", replica_id: str = "") -> str:
    """The job that a call acts in: `named` in its message, or its metadata's. `replica_id`: as or on which group.

    Raises NotPermitted for a caller that is bound to another.
    """
    job = named or job_named(call)
    check_bounds(call.principal, job, replica_id)
    return job


def live_member(driver: JobDriver, replica_id: str) -> Member:
    member = driver.member(replica_id)
    if member is None or not member.is_alive:
        alive = ", ".join(sorted(m.replica_id for m in driver.machine.roster if m.is_alive)[:16]) or "none"
        raise UnknownName(f"replica_id: no live replica group {replica_id!r}; alive: {alive}")
    return member
