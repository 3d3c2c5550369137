"""Who may do what: roles, and the one table of every RPC and every HTTP route.

A server asks `check` before a handler runs, and does not start with a method or a route that the table lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.coordinator import token_command
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, MANAGER_SECRET_VARIABLE
from lighthouse_protocol.refusals import NotPermitted


class Role(StrEnum):
    """What a credential is for. OPERATE includes all; VIEW and JOIN include PROBE, and not each other."""

    PROBE = "probe"  # learn that a daemon is there
    VIEW = "view"  # read status and metrics
    JOIN = "join"  # train: be a group, a rank, a supervisor
    OPERATE = "operate"  # kill, drain, stop; read what ranks print and where they are in their code


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, by its credential. `name` is for logs and the audit: never a secret. `job` and `replica_id`: it is
    bound to these; empty: to none."""

    name: str
    roles: frozenset[Role]
    job: str = ""
    replica_id: str = ""

    def may(self, needed: frozenset[Role]) -> bool:
        """Whether one of `needed` is among the roles, or included in one of them."""
        return Role.OPERATE in self.roles or Role.PROBE in needed or not needed.isdisjoint(self.roles)


NOBODY = Principal("none", frozenset())
"""A caller without a credential."""

Needed = frozenset[Role]  # any of them
_ACTS = frozenset({"Kill", "Drain", "StopRun", "ResumeRun", "POST /kill", "POST /drain", "POST /stop", "POST /resume"})

_PROBE: Needed = frozenset({Role.PROBE})
_VIEW: Needed = frozenset({Role.VIEW})
_JOIN: Needed = frozenset({Role.JOIN})
_MEMBER_OR_VIEW: Needed = frozenset({Role.JOIN, Role.VIEW})  # without what ranks print
_OPERATE: Needed = frozenset({Role.OPERATE})

_LIGHTHOUSE: Mapping[str, Needed] = {
    "Quorum": _JOIN,
    "Heartbeat": _JOIN,
    "Session": _JOIN,
    "Rank": _JOIN,
    "Supervise": _JOIN,
    "PutKey": _JOIN,
    "GetKeys": _JOIN,
    "Status": _MEMBER_OR_VIEW,
    "Runs": _MEMBER_OR_VIEW,
    "Incidents": _MEMBER_OR_VIEW,
    "Incident": _OPERATE,
    "Stacks": _OPERATE,
    "Kill": _OPERATE,
    "Drain": _OPERATE,
    "StopRun": _OPERATE,
    "ResumeRun": _OPERATE,
}
_MANAGER: Mapping[str, Needed] = {
    "Quorum": _JOIN,
    "CheckpointAddress": _PROBE,  # of peers: the handler asks for a proof that they are
    "ShouldCommit": _JOIN,
    "Watch": _JOIN,
    "Report": _JOIN,
    "Node": _JOIN,
    "Status": _MEMBER_OR_VIEW,
    "Kill": _OPERATE,
}
_SERVICES: Mapping[str, Mapping[str, Needed]] = {
    "lighthouse.v1.LighthouseService": _LIGHTHOUSE,
    "LighthouseService": _LIGHTHOUSE,
    "torchft.LighthouseService": {"Quorum": _JOIN, "Heartbeat": _JOIN},
    "manager.v1.ManagerService": _MANAGER,
    "ManagerService": _MANAGER,
    "torchft.ManagerService": {
        "Quorum": _JOIN,
        "CheckpointMetadata": _PROBE,
        "ShouldCommit": _JOIN,
        "Kill": _OPERATE,
    },
    "grpc.health.v1.Health": {"Check": _PROBE, "Watch": _PROBE, "List": _PROBE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _PROBE},
}
_ROUTES: Mapping[str, Needed] = {
    "GET /livez": _PROBE,
    "GET /readyz": _PROBE,
    "GET /": _PROBE,  # the page's own text; what it shows comes by /events and /status
    "GET /control": _PROBE,  # what the caller may do
    "POST /login": _PROBE,
    "GET /metrics": _VIEW,
    "GET /status": _VIEW,
    "GET /events": _VIEW,
    "GET /incidents/{id}": _OPERATE,
    "GET /log": _OPERATE,  # it names hosts, and quotes what callers have sent
    "POST /kill": _OPERATE,
    "POST /drain": _OPERATE,
    "POST /stop": _OPERATE,
    "POST /resume": _OPERATE,
    "POST /stacks": _OPERATE,
}
POLICY: Mapping[str, Needed] = {
    **{f"/{service}/{method}": needed for service, methods in _SERVICES.items() for method, needed in methods.items()},
    **_ROUTES,
}
"""By the path of an RPC, and by method and path of an HTTP route."""


def needed(path: str) -> Needed:
    """Raises KeyError for what has no entry: a server with such a method does not start."""
    try:
        return POLICY[path]
    except KeyError:
        raise KeyError(f"{path} has no entry in lighthouse_protocol/rules/access.py: say which role it needs") from None


def is_control(path: str) -> bool:
    """Whether it acts on a job, or shows what ranks print: refusals of it are worth an audit line."""
    return POLICY[path] == _OPERATE


def name_of(path: str) -> str:
    """What people call it: Kill, or POST /kill."""
    return path.rpartition("/")[2] if path.startswith("/") else path


def is_act(path: str) -> bool:
    """Whether it changes what runs: each such call is worth an audit line."""
    return name_of(path) in _ACTS


def _way_to_show(path: str) -> str:
    if path in _ROUTES:
        return "sign in on the page with its output, or send it as `Authorization: Bearer ...`"
    return "set --lighthouse or LIGHTHOUSE_ADDRESS to its output"


def check(path: str, principal: Principal, port: int = LIGHTHOUSE_PORT) -> None:
    """Raises NotPermitted that names the remedy. `port`: of the lighthouse's gRPC."""
    wanted = needed(path)
    if principal.may(wanted):
        return
    words = " or ".join(sorted(wanted))
    what = name_of(path)
    remedy = _remedy(path, wanted, port)
    if principal is NOBODY:
        raise NotPermitted(f"{what} needs a credential of role {words}, and the caller shows none: {remedy}")
    if not principal.roles:
        raise NotPermitted(
            f"{what} needs a credential of role {words}; {principal.name} has no role: add it to the lighthouse's "
            "--tls-identities file, or also show a token"
        )
    has = " and ".join(sorted(principal.roles))
    raise NotPermitted(f"{what} needs a credential of role {words}; {principal.name} has role {has}: {remedy}")


def _remedy(path: str, wanted: Needed, port: int) -> str:
    if "ManagerService/" in path:
        return (
            f"set {MANAGER_SECRET_VARIABLE} to the secret of this group, which its ranks and supervisors have; "
            "operators ask the lighthouse, by `lighthouse kill`"
        )
    verb = "operate" if wanted == _OPERATE else "join" if Role.JOIN in wanted else "view"
    return f"run {token_command(port, verb)} on the lighthouse's host, and {_way_to_show(path)}"


_BOUND = "the lighthouse's --tls-identities file defines what a certificate is bound to"


def check_bounds(principal: Principal, job: str, replica_id: str = "") -> None:
    """Raises NotPermitted where the principal is bound to another job, or another replica group, than it acts on.
    `replica_id` is empty for what each group may do for itself; see check_bounds_on_run() for what ends others, too."""
    if principal.job and principal.job != job:
        raise NotPermitted(f"{principal.name} is bound to job {principal.job}, and may not act in job {job}; {_BOUND}")
    if principal.replica_id and replica_id and principal.replica_id != replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and may not act as or on "
            f"{replica_id}; {_BOUND}"
        )


def check_bounds_on_run(principal: Principal, job: str, what: str) -> None:
    """As check_bounds(), for `what` an operator does to a run: it has ranks of other groups, too."""
    check_bounds(principal, job)
    if principal.replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and {what} acts on all groups of a "
            f"run; {_BOUND}"
        )
