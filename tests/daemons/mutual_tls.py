"""A lighthouse with certificates of its user's own PKI, which asks its callers for theirs (mTLS)."""

import json
import socket
import ssl
from pathlib import Path

from lighthouse_protocol.coordinator import Coordinator, TlsFiles, parse_coordinator
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.secured import OverTls
from tests.own_pki import Pair, Pki
from tests.processes import LOCALHOST, Lighthouse

IDENTITIES = """
"spiffe://example.org/operators/*" = { role = "operate" }
"spiffe://example.org/train/{job}/{replica_id}" = { role = "join" }
"*.workers.example.org" = { role = "join" }
"prometheus.example.org" = { role = "view" }
"spiffe://example.org/admins/{job}" = { role = "operate" }
"spiffe://example.org/admins/{job}/{replica_id}" = { role = "operate" }
"""
SERVER = ("localhost",)
OPERATOR = "spiffe://example.org/operators/eve"
GROUP_A = "spiffe://example.org/train/llm/a"
WORKER = "node-1.workers.example.org"


class Site(OverTls):
    """A lighthouse, and the CA of all certificates."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.pki = Pki(folder)
        self.server = self.pki.issue("server", *SERVER)
        self.identities = folder / "identities.toml"
        self.identities.write_text(IDENTITIES)
        credentials = folder / "credentials"
        self.client_ca = folder / "clients.pem"
        self.client_ca.write_bytes(self.pki.ca.read_bytes())
        options = {
            "--tls-cert": self.server.cert,
            "--tls-key": self.server.key,
            "--tls-client-ca": self.client_ca,
            "--tls-identities": self.identities,
            "--credentials": credentials,
        }
        super().__init__(Lighthouse(*(str(part) for pair in options.items() for part in pair), *more), credentials)

    def at(self, files: TlsFiles, host: str = "localhost") -> Coordinator:
        return parse_coordinator(f"{host}:{self.lighthouse.port}").with_files(files)

    def client(self, *names: str, job: str = "llm") -> LighthouseClient:
        return LighthouseClient(self.at(self.pki.files(self.pki.issue("client", *names))), job=job)

    @property
    def address(self) -> str:
        return f"localhost:{self.lighthouse.port}"

    def get(self, path: str, client: Pair | None = None, **headers: str) -> tuple[int, str]:
        return self.ask(path, None, headers, self._context(client))

    def post(self, path: str, body: object, client: Pair, **headers: str) -> tuple[int, str]:
        return self.ask(path, json.dumps(body).encode(), headers, self._context(client))

    def _context(self, client: Pair | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.pki.ca)
        if client is not None:
            context.load_cert_chain(client.cert, client.key)
        return context

    def serial(self, port: int) -> int:
        """Of the certificate that a new connection is shown."""
        context = self._context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with socket.create_connection((LOCALHOST, port), 60) as raw:
            with context.wrap_socket(raw, server_hostname="localhost") as tls:
                return int((tls.getpeercert() or {})["serialNumber"], 16)  # type: ignore[arg-type]
