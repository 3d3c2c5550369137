"""Client for etcd's v3 API through its JSON gateway, with aiohttp as the only dependency.

The client supports what the lighthouse needs: reads, conditional writes and leases. Each call goes to one endpoint and
has a deadline. After a failure, the next call goes to the next endpoint. A failed call may still have been executed, so
callers repeat a write only with conditions that make it idempotent. The module also parses `--store` and reads the
credentials for etcd.
"""

import asyncio
import base64
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotPermitted, Unreachable, WrongState
from lighthouse_runtime.process.files import WatchedFile
from lighthouse_runtime.security.client_tls import load_key_pair

OPTION = "--store"
SCHEME = "etcd://"
DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/lighthouse"
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Addresses of an etcd cluster and a key prefix, written `etcd://a:2379,b:2379/prefix`."""

    endpoints: tuple[Address, ...]  # members of one etcd cluster
    prefix: str = DEFAULT_PREFIX  # has a slash at its start, and none at its end

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(map(str, self.endpoints))}{self.prefix}"


def parse_etcd_address(text: str) -> EtcdAddress:
    """Parse the value of `--store`. Raise InvalidRequest if `text` is not a valid address."""
    if not text.startswith(SCHEME):
        raise InvalidRequest(
            f"{text!r} is not a store; write etcd://HOST:{DEFAULT_PORT},HOST:{DEFAULT_PORT}", field=OPTION
        )
    hosts, slash, path = text.removeprefix(SCHEME).partition("/")
    prefix = f"/{path.rstrip('/')}" if slash and path.strip("/") else DEFAULT_PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise InvalidRequest(
            f"{prefix!r}: a prefix has letters, digits, '.', '_' and '-' between slashes", field=OPTION
        )
    endpoints = tuple(dict.fromkeys(_endpoint(part) for part in hosts.split(",")))
    return EtcdAddress(endpoints, prefix)


def _endpoint(text: str) -> Address:
    address = parse_address(text.strip(), OPTION)
    if address.port == 0:
        raise InvalidRequest(f"{text!r}: port 0 is not a port to connect to", field=OPTION)
    return Address(address.host, address.port or DEFAULT_PORT)


_REFUSED = ("permission denied", "user name is empty", "authentication failed")
# etcd ends a login when its token expires. With JWT tokens, any change to a user or role ends all logins.
# The last text answers a call that was sent without a token, because another call had just dropped the expired token.
_LOGIN_ENDED = ("invalid auth token", "revision of auth store is old", "user name is empty")
_LEASE_GONE = "etcdserver: requested lease not found"


class StoreUnavailable(Unreachable):
    """etcd did not answer, or has no quorum. The request may have been executed."""


class LoginEnded(StoreUnavailable):
    """etcd no longer accepts the token of this client's login, so it has not executed the request."""


class LeaseGone(WrongState):
    """The lease has expired or was revoked."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    create_revision: int  # revision of the store at which the key was created
    mod_revision: int  # revision of the store at the last write
    version: int  # writes since the key was created
    lease: int


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    succeeded: bool  # True if the guards held
    revision: int  # revision of the store after the transaction
    reads: tuple[tuple[KeyValue, ...], ...]  # results of its read operations, in order


Json = Mapping[str, Any]


class EtcdClient:
    """Client for an etcd cluster. Call `open` before the first request.

    Args:
        address: The cluster.
        tls: TLS settings, or None for plain HTTP. New connections use the newest settings.
        user: Name and password, or None if etcd does not require authentication. Each login uses the newest values.
    """

    def __init__(
        self,
        address: EtcdAddress,
        tls: WatchedFile[ssl.SSLContext] | None = None,
        user: WatchedFile[tuple[str, str]] | None = None,
    ) -> None:
        self.address = address
        self._tls = tls
        self._user = user
        self._token = ""
        self._at = 0
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(trust_env=False)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def read(self, start: bytes, end: bytes | None, timeout_s: float) -> tuple[KeyValue, ...]:
        """Read the keys from `start` up to but excluding `end`, or only `start` if `end` is None.

        The read is linearizable.
        """
        answer = await self._call("kv/range", read_request(start, end), timeout_s)
        return _key_values(answer)

    async def transact(
        self, guards: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json], timeout_s: float
    ) -> Answer:
        """Execute the operations `then` if all `guards` hold, or else `otherwise`, in one transaction."""
        body = {"compare": list(guards), "success": list(then), "failure": list(otherwise)}
        answer = await self._call("kv/txn", body, timeout_s)
        reads = tuple(_key_values(r["response_range"]) for r in answer.get("responses", ()) if "response_range" in r)
        return Answer(bool(answer.get("succeeded")), int(answer["header"]["revision"]), reads)

    async def grant(self, ttl_s: int, timeout_s: float) -> Lease:
        """Create a lease. Its duration may be longer than requested, because etcd has a minimum."""
        answer = await self._call("lease/grant", {"TTL": str(ttl_s)}, timeout_s)
        return Lease(int(answer["ID"]), float(answer["TTL"]))

    async def renew(self, lease: int, timeout_s: float) -> float:
        """Renew a lease and return its new time to live in seconds. Raise LeaseGone if it has ended."""
        answer = (await self._call("lease/keepalive", {"ID": str(lease)}, timeout_s)).get("result", {})
        ttl_s = float(answer.get("TTL", 0))
        if ttl_s <= 0:
            raise LeaseGone(f"etcd has ended lease {lease:x}")
        return ttl_s

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """Revoke a lease. Do nothing if it has already expired."""
        try:
            await self._call("lease/revoke", {"ID": str(lease)}, timeout_s)
        except LeaseGone:
            return

    async def _call(self, method: str, body: Json, timeout_s: float) -> dict[str, Any]:
        at = self._at
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._post_as_user(at, method, body)
                except LoginEnded:
                    return await self._post_as_user(at, method, body)
        except TimeoutError:
            raise self._unavailable(at, f"no answer within {timeout_s:.3g} s") from None

    async def _post_as_user(self, at: int, method: str, body: Json) -> dict[str, Any]:
        if self._user is not None and not self._token:
            name, password = self._user.value
            answer = await self._post(at, "auth/authenticate", {"name": name, "password": password})
            self._token = str(answer["token"])
        return await self._post(at, method, body)

    async def _post(self, at: int, method: str, body: Json) -> dict[str, Any]:
        assert self._http is not None
        scheme = "http" if self._tls is None else "https"
        headers = {"Authorization": self._token} if self._token else {}
        url = f"{scheme}://{self.address.endpoints[at]}/v3/{method}"
        tls = False if self._tls is None else self._tls.value
        try:
            async with self._http.post(
                url, data=json.dumps(body), headers=headers, ssl=tls, allow_redirects=False
            ) as answer:
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as e:
            why = getattr(e, "strerror", None) or str(e) or type(e).__name__
            if self._tls is not None and self._tls.error:
                why += f"; the previous certificates are in use, because {self._tls.error}"
            raise self._unavailable(at, why) from e
        try:
            document = json.loads(raw)
            assert isinstance(document, dict)
        except (ValueError, AssertionError):
            raise self._unavailable(at, f"HTTP {status} {raw[:80]!r}, which is not from etcd's gateway") from None
        if status == HTTPStatus.OK and "error" not in document:
            return document
        raise self._refusal(at, status, document)

    def _refusal(self, at: int, status: int, document: dict[str, Any]) -> LighthouseError:
        error = document.get("error", "")
        text = str(error.get("message", "") if isinstance(error, dict) else error) or f"HTTP {status}"
        if text == _LEASE_GONE:
            return LeaseGone(text)
        if self._user is not None and any(words in text for words in _LOGIN_ENDED):
            self._token = ""
            return LoginEnded(str(self._unavailable(at, text)))
        if status == HTTPStatus.UNAUTHORIZED or any(words in text for words in _REFUSED):
            self._token = ""
            return NotPermitted(
                f"etcd at {self.address.endpoints[at]}: {text}; give a user that may write {self.address.prefix}"
            )
        return self._unavailable(at, text)

    def _unavailable(self, at: int, why: str) -> StoreUnavailable:
        """Switch from endpoint `at` to the next one, and return the error to raise."""
        if self._at == at:
            self._at = (at + 1) % len(self.address.endpoints)
        return StoreUnavailable(f"etcd at {self.address.endpoints[at]}: {why}")


# -- guards and operations of a transaction


def text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def read_request(start: bytes, end: bytes | None = None) -> dict[str, str]:
    return {"key": text(start)} | ({"range_end": text(end)} if end is not None else {})


def was_made_at(key: bytes, revision: int) -> Json:
    """Return the condition that a key was created at `revision`, or does not exist if `revision` is 0."""
    return {"key": text(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def has_version(key: bytes, version: int) -> Json:
    return {"key": text(key), "target": "VERSION", "result": "EQUAL", "version": str(version)}


def was_changed_at(key: bytes, revision: int) -> Json:
    """Return the condition that a key was last written at `revision`, or does not exist if `revision` is 0."""
    return {"key": text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: bytes, value: bytes, lease: int = 0) -> Json:
    return {"request_put": {"key": text(key), "value": text(value), "lease": str(lease)}}


def touch(key: bytes) -> Json:
    """Return the operation that increments a key's version without changing its value or lease."""
    return {"request_put": {"key": text(key), "ignore_value": True, "ignore_lease": True}}


def read(start: bytes, end: bytes | None = None) -> Json:
    return {"request_range": read_request(start, end)}


def delete(start: bytes, end: bytes | None = None) -> Json:
    return {"request_delete_range": read_request(start, end)}


def _key_values(answer: Mapping[str, Any]) -> tuple[KeyValue, ...]:
    return tuple(
        KeyValue(
            base64.b64decode(kv["key"]),
            base64.b64decode(kv.get("value", "")),
            int(kv["create_revision"]),
            int(kv["mod_revision"]),
            int(kv["version"]),
            int(kv.get("lease", 0)),
        )
        for kv in answer.get("kvs", ())
    )


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """Paths of the credential files for etcd. All but `user_file` are PEM files.

    etcd's JSON gateway ignores the user name in a client certificate. If etcd requires authentication, it also needs
    `user_file`.
    """

    ca: Path | None = None  # plain HTTP if None
    cert: Path | None = None
    key: Path | None = None
    user_file: Path | None = None  # one line, NAME:PASSWORD

    def tls(self) -> WatchedFile[ssl.SSLContext] | None:
        """Return the TLS settings, which are reloaded when a file changes, or None for plain HTTP.

        Raise InvalidRequest if a file is missing or unusable.
        """
        if self.ca is None:
            if self.cert is not None:
                raise InvalidRequest("also needs --store-ca", field="--store-cert")
            return None
        return WatchedFile(self._context, *filter(None, (self.ca, self.cert, self.key)))

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as e:
            raise InvalidRequest(f"cannot read {self.ca}: {e}", field="--store-ca") from e
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            try:
                load_key_pair(context, self.cert, self.key)
            except (OSError, ssl.SSLError) as e:
                raise InvalidRequest(f"cannot read {self.cert} with --store-key: {e}", field="--store-cert") from e
        return context

    def user(self) -> WatchedFile[tuple[str, str]] | None:
        """Return the name and password, which are reloaded when the file changes, or None without `user_file`.

        Raise InvalidRequest if the file is missing or malformed.
        """
        path = self.user_file
        return None if path is None else WatchedFile(lambda: _read_user(path), path)


def _read_user(path: Path) -> tuple[str, str]:
    try:
        name, colon, password = path.read_text().strip().partition(":")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"cannot read {path}: {e}", field="--store-user-file") from e
    if not (name and colon and password):
        raise InvalidRequest(f"{path} must hold one line, NAME:PASSWORD", field="--store-user-file")
    return name, password
