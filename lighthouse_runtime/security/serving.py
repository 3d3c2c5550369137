"""Files through which a user's processes find the credentials of the user's lighthouses on the same host.

A lighthouse writes the file of its gRPC port at each start. It does not remove the file on exit, so that clients that
are waiting for its restart keep using TLS. Another program on that port cannot impersonate the lighthouse, because the
file pins the CA.
"""

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import InvalidRequest, Unreachable
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.process.files import file_stamp, make_private, state_folder, write_private
from lighthouse_runtime.security.client_tls import RETRY_S
from lighthouse_runtime.security.credentials import Tokens

_OPTION = "--credentials"
_FILE = re.compile(r"serving-(\d{1,5})\.json")


@dataclass(frozen=True, slots=True)
class Serving:
    """Location of a lighthouse's credentials on this host. `ca_pin` is empty without TLS or with the user's own PKI."""

    ca_pin: str
    credentials: Path
    has_own_pki: bool = False

    def coordinator(self, addresses: tuple[Address, ...], token: str) -> Coordinator:
        return Coordinator(addresses, self.ca_pin, token, self.has_own_pki)


def write_serving_file(port: int, serving: Serving | None) -> None:
    """Write the file through which this user's processes find the credentials of the lighthouse on `port`.

    If `serving` is None, remove the file. Raise OSError on failure, or InvalidRequest without a home directory.
    """
    path = _path(port)
    if serving is None:
        path.unlink(missing_ok=True)
        return
    make_private(path.parent)
    write_private(path, (json.dumps(asdict(serving), default=str) + "\n").encode())


def read_serving_file(port: int) -> Serving | None:
    """Return the location of the credentials of the lighthouse on `port`, or None if this user has no valid file."""
    try:
        path = _path(port)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            found = json.loads(file.read())
        return Serving(str(found["ca_pin"]), Path(found["credentials"]), bool(found["has_own_pki"]))
    except (OSError, ValueError, KeyError, TypeError, InvalidRequest):
        return None


def served_ports() -> tuple[int, ...]:
    """Return the gRPC ports of this user's lighthouses with credentials on this host, most recently started first."""
    try:
        files = [(path.stat().st_mtime, path.name) for path in state_folder(_OPTION).iterdir()]
    except (OSError, InvalidRequest):
        return ()
    found = (_FILE.fullmatch(name) for _, name in sorted(files, reverse=True))
    ports = (int(match[1]) for match in found if match)
    return tuple(port for port in ports if read_serving_file(port) is not None)


def with_local_credentials(coordinator: Coordinator, role: Role) -> Coordinator:
    """Add the credentials of this user's lighthouse if `coordinator` is a loopback address without credentials."""
    if not _may_be_given(coordinator):
        return coordinator
    serving = read_serving_file(coordinator.addresses[0].port or 0)
    if serving is None:
        return coordinator
    try:
        # A caller with a certificate has the certificate's role, not the user's.
        token = "" if coordinator.files.cert else Tokens.read(serving.credentials).newest(role)
    except InvalidRequest:
        return coordinator
    return replace(serving.coordinator(coordinator.addresses, token), files=coordinator.files)


def _may_be_given(coordinator: Coordinator) -> bool:
    return not coordinator.token and not coordinator.ca_pin and coordinator.is_loopback


class Locator:
    """Finds the credentials of a lighthouse on this host. They may change when the lighthouse restarts."""

    def __init__(self, coordinator: Coordinator, role: Role) -> None:
        """Store the lighthouse's address. `role` selects one of the lighthouse's tokens."""
        self._given = coordinator
        self._role = role
        self._may_change = _may_be_given(coordinator)
        self._stamp: object = None
        self._found = coordinator

    def find(self) -> Coordinator:
        if self._may_change:
            try:
                stamp = file_stamp(_path(self._given.addresses[0].port or 0))
            except InvalidRequest:  # this user has no home directory
                return self._found
            if stamp != self._stamp:
                self._stamp = stamp
                self._found = with_local_credentials(self._given, self._role)
        return self._found

    def wait(self, timeout_s: float) -> Coordinator:
        """Wait until a server listens, and return the result of find(). Raise Unreachable after `timeout_s` seconds.

        A lighthouse writes the file with its credentials before it listens.
        """
        if not self._may_change:
            return self._given
        ends_at, address = time.monotonic() + timeout_s, self._given.addresses[0]
        while not (found := self.find()).has_tls:
            try:
                socket.create_connection((address.host, address.port or 0), 1.0).close()
                return self.find()
            except OSError as e:
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    raise Unreachable(f"{address} is unreachable: {e.strerror or e}; start it") from None
                time.sleep(min(RETRY_S, left_s))
        return found


def _path(port: int) -> Path:
    return state_folder(_OPTION) / f"serving-{port}.json"  # as _FILE
