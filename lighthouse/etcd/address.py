"""`--store etcd://a:2379,b:2379,c:2379/prefix`: where etcd is, and under which prefix the records are."""

import re
from dataclasses import dataclass

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.refusals import InvalidRequest

OPTION = "--store"
SCHEME = "etcd://"
DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/lighthouse"
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """`endpoints` are members of one etcd cluster; `prefix` starts with a slash and does not end with one."""

    endpoints: tuple[Address, ...]
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(map(str, self.endpoints))}{self.prefix}"


def parse_etcd_address(text: str) -> EtcdAddress:
    """Raises InvalidRequest that names `--store`."""
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
