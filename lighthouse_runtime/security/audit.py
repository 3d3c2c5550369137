"""Audit log of operators' actions and of refused attempts, in the normal log and in files.

Anyone can cause refusals, so they are written at a limited rate and to a separate file, where they cannot displace the
records of actions.
"""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.rules.access import Principal
from lighthouse_runtime.log_event import event

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 * 1024 * 1024
GENERATIONS = 4
REFUSALS_PER_S = 2.0
REFUSALS_AT_ONCE = 50.0


class Audit:
    """Writes audit records as JSON lines."""

    def __init__(self, path: Path | None) -> None:
        """Set the file for actions.

        Refusals are written to a file next to it, for example `audit.refused.jsonl` for `audit.jsonl`. Only this user
        can read the files. They are rotated to `<path>.1` ... `<path>.GENERATIONS`.

        Args:
            path: File for actions, or None to write to the normal log only.
        """
        self._path = path
        self._has_failed = False
        self._left_out = 0
        self._allowance = REFUSALS_AT_ONCE
        self._refilled_at = time.monotonic()

    def act(self, principal: Principal, peer: str, what: str, target: str, result: str = "done") -> None:
        """Record an action and its result."""
        self._write(self._path, principal, peer, what, target, result)

    def refuse(self, principal: Principal, peer: str, what: str, reason: str, target: str = "") -> None:
        now = time.monotonic()
        self._allowance = min(REFUSALS_AT_ONCE, self._allowance + (now - self._refilled_at) * REFUSALS_PER_S)
        self._refilled_at = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        more = f" ({self._left_out} more refusals were not noted)" if self._left_out else ""
        self._left_out = 0
        path = None if self._path is None else self._path.with_suffix(".refused" + self._path.suffix)
        self._write(path, principal, peer, what, target, f"refused: {reason}{more}")

    def _write(self, path: Path | None, principal: Principal, peer: str, what: str, target: str, result: str) -> None:
        target, result = cut_reason(target), cut_reason(result)
        roles = "+".join(sorted(principal.roles)) or "none"
        act = f"{what} {target}".strip()
        log.info(
            "audit: %s by %s (role %s) at %s: %s",
            act,
            principal.name,
            roles,
            peer,
            result,
            extra=event(
                "audit", what=what, target=target, credential=principal.name, role=roles, peer=peer, result=result
            ),
        )
        if path is None:
            return
        entry = {
            "time": round(time.time(), 3),
            "role": roles,
            "credential": principal.name,
            "peer": peer,
            "what": what,
            "target": target,
            "result": result,
        }
        try:
            _append(path, (json.dumps(entry, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        except OSError as e:
            if not self._has_failed:
                log.error(
                    "cannot write the audit log to %s: %s; audit records go to this log only",
                    path,
                    e,
                    extra=event("audit_not_written"),
                )
            self._has_failed = True
        else:
            self._has_failed = False


def _append(path: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            older = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, GENERATIONS + 1))]
            for target, source in zip(reversed(older[1:]), reversed(older[:-1]), strict=True):
                with suppress(FileNotFoundError):
                    os.replace(source, target)
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o600)
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
