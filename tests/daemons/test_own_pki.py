"""A lighthouse with certificates of its user's own PKI: which gets in, what others are told, and how files change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lighthouse_protocol.coordinator import NO_FILES, Coordinator, TlsFiles, parse_coordinator
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import Hello, Welcome
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, UnknownName, Unreachable, Untrusted
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.clients import AsyncLighthouseClient, LighthouseClient
from lighthouse_runtime.security.client_tls import variables_of
from lighthouse_runtime.security.credentials import Tokens
from tests.daemons.groups import training
from tests.daemons.mutual_tls import GROUP_A, IDENTITIES, OPERATOR, SERVER, WORKER, Site
from tests.own_pki import DAY, Pki
from tests.processes import LIGHTHOUSE_CODE, LOCALHOST, Lighthouse, eventually, run_cli

SECRET = "a_secret_of_a_manager_in_these_tests"


# -- who gets in


def test_a_certificate_has_the_role_and_the_bounds_of_its_line(site: Site) -> None:
    with site.client(OPERATOR) as client, pytest.raises(UnknownName):
        client.kill("a")
    assert site.audit[-1]["credential"] == f"certificate {OPERATOR}"
    with site.client("prometheus.example.org") as client:
        client.status()
        with pytest.raises(NotPermitted, match=r"certificate prometheus\.example\.org has role view"):
            client.heartbeat("a")
    with site.client(WORKER) as client:
        client.heartbeat("anything")
    with site.client(GROUP_A) as client:
        client.heartbeat("a")
        with pytest.raises(NotPermitted, match="is bound to replica group a, and may not act as or on b"):
            client.heartbeat("b")
        with pytest.raises(NotPermitted, match="may not act as or on b"):
            client.quorum(Participant("b"), timeout_s=60)
    with site.client(GROUP_A, job="other") as client:
        with pytest.raises(NotPermitted, match="is bound to job llm, and may not act in job other"):
            client.heartbeat("a")
        with pytest.raises(NotPermitted, match="may not act in job other"):
            client.get_keys(timeout_s=60)


def test_a_certificate_without_a_line_needs_a_token_too(site: Site) -> None:
    files = site.pki.files(site.pki.issue("stranger", "stranger.example.org"))
    with LighthouseClient(site.at(files)) as client, pytest.raises(NotPermitted) as e:
        client.status()
    assert "certificate stranger.example.org has no role: add it to the lighthouse's --tls-identities" in str(e.value)
    said = run_cli(LIGHTHOUSE_CODE, "token", "view", "--credentials", str(site.folder), "--host", "localhost",
                   "--port", str(site.lighthouse.port))  # fmt: skip
    assert said.stdout.startswith("lighthouse://tls.lhv_")
    with LighthouseClient(parse_coordinator(said.stdout).with_files(files)) as client:
        client.status()
    wrong = replace(site.at(files), token="lhv_" + "guess" * 6)
    with LighthouseClient(wrong) as client, pytest.raises(NotPermitted, match="or was rotated away: run"):
        client.status()


def test_http_takes_certificates_and_probes_come_without(site: Site) -> None:
    viewer, worker = site.pki.issue("viewer", "prometheus.example.org"), site.pki.issue("worker", WORKER)
    assert site.get("/livez")[0] == 200
    assert site.get("/metrics")[0] == 403
    assert site.get("/metrics", worker)[0] == 403
    assert site.get("/metrics", viewer)[0] == 200
    proxied, _ = site.get("/metrics", viewer, **{"X-Forwarded-For": "10.0.0.1"})
    assert proxied == 403, "the proxy's certificate is not its caller's"


# -- what does not fit, in one line


def unfit(site: Site, case: str, folder: Path) -> tuple[Coordinator, type[LighthouseError], str]:
    good, other = site.pki.issue("good", WORKER), Pki(folder, "other")
    match case:
        case "no client certificate":
            return site.at(site.pki.files()), Unreachable, "a client without a certificate: set --client-cert and"
        case "another CA's client certificate":
            files = replace(site.pki.files(other.issue("foreign", WORKER)), ca=str(site.pki.ca))
            return site.at(files), Unreachable, "foreign.pem must be signed by a CA in its --tls-client-ca"
        case "expired client certificate":
            old = site.pki.issue("old", WORKER, begins=-9 * DAY, lasts=DAY)
            return site.at(site.pki.files(old)), Unreachable, "old.pem has expired; this host's clock says"
        case "unknown CA":
            files = replace(site.pki.files(good), ca=str(other.ca))
            return site.at(files), Untrusted, "was not issued by a CA in " + str(other.ca)
        case "another name":
            return site.at(site.pki.files(good), LOCALHOST), Untrusted, "does not contain 127.0.0.1"
        case "no TLS":
            return site.at(NO_FILES), Unreachable, "set --tls-ca"
        case "half a pair":
            files = TlsFiles(str(site.pki.ca), str(good.cert), str(other.issue("wrong", WORKER).key))
            return site.at(files), Unreachable, "cannot be used"
        case "no such file":
            return site.at(TlsFiles(str(folder / "none.pem"))), Unreachable, "--tls-ca: cannot read"
        case _:
            empty = folder / "empty.pem"
            empty.write_text("")
            return site.at(TlsFiles(str(empty))), Unreachable, "has no CA certificate"


@pytest.mark.parametrize(
    "case",
    [
        "no client certificate",
        "another CA's client certificate",
        "expired client certificate",
        "unknown CA",
        "another name",
        "no TLS",
        "half a pair",
        "no such file",
        "no CA in it",
    ],
)
async def test_what_does_not_fit_is_one_clear_line(site: Site, case: str, tmp_path: Path) -> None:
    coordinator, kind, words = unfit(site, case, tmp_path)
    async with AsyncLighthouseClient(coordinator) as client, client.session() as session:
        with pytest.raises(kind) as e:
            async for _ in session:
                pass
    assert type(e.value) is kind
    assert words in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"begins": -9 * DAY, "lasts": DAY}, "has expired; this host's clock says"),
        ({"begins": 5 * DAY}, "is not valid yet; this host's clock says"),
    ],
)
def test_a_servers_certificate_out_of_its_time_is_one_clear_line(
    tmp_path: Path, times: dict[str, Any], words: str
) -> None:
    pki = Pki(tmp_path)
    server = pki.issue("server", *SERVER, **times)
    with Lighthouse("--tls-cert", str(server.cert), "--tls-key", str(server.key),
                    "--credentials", str(tmp_path / "c")) as lighthouse:  # fmt: skip
        said = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", f"localhost:{lighthouse.port}",
                       "--tls-ca", str(pki.ca))  # fmt: skip
    assert said.returncode == 1
    assert words in said.stderr
    assert [line for line in said.stderr.splitlines() if line.startswith("Error: ")] == said.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tls-cert", "{cert}"), "--tls-cert also needs --tls-key"),
        (("--tls-identities", "{cert}"), "--tls-identities also needs --tls-client-ca"),
        (("--tls-cert", "{cert}", "--tls-key", "{key}", "--insecure"), "contradict each other"),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "--tls-cert: {cert} with the key {other} cannot be used"),
        (("--tls-client-ca", "{key}"), "{key} has no certificates of CAs"),
        (("--tls-client-ca", "{cert}", "--tls-identities", "{cert}"), "--tls-identities: is not TOML"),
    ],
)
def test_options_that_do_not_fit_end_the_start(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    pki = Pki(tmp_path)
    one, other = pki.issue("one", *SERVER), pki.issue("other", *SERVER)
    names = {"cert": str(one.cert), "key": str(one.key), "other": str(other.key)}
    given = (option.format(**names) for option in options)
    said = run_cli(LIGHTHOUSE_CODE, "serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--journal", "none",
                   "--credentials", str(tmp_path / "c"), *given)  # fmt: skip
    assert said.returncode != 0
    assert words.format(**names) in said.stderr


# -- commands, managers and what they start


def test_the_commands_and_the_managers_take_files_by_option_and_variable(site: Site) -> None:
    operator = site.pki.files(site.pki.issue("operator", OPERATOR))
    worker = variables_of(site.pki.files(site.pki.issue("manager", WORKER)))
    by_option = ("--tls-ca", operator.ca, "--client-cert", operator.cert, "--client-key", operator.key)
    with training(site.address, "pki", "ab", env=worker) as groups:
        told = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", site.address, "--job", "pki", *by_option)
        assert told.returncode == 0, told.stderr
        assert "pki" in told.stdout
        said = run_cli(LIGHTHOUSE_CODE, "kill", "b", "--lighthouse", site.address, "--job", "pki", env=worker)
        assert (said.returncode, "has role join" in said.stderr) == (1, True), said.stderr
        said = run_cli(LIGHTHOUSE_CODE, "drain", "b", "--lighthouse", site.address, "--job", "pki",
                       env=variables_of(operator))  # fmt: skip
        assert said.returncode == 0, said.stderr
        groups[1].join()
        assert groups[1].drained


# -- what changes while it runs


async def test_files_change_under_an_open_session_and_nothing_is_dropped(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.lighthouse as lighthouse:
        client_files = site.pki.files(site.pki.issue("first", WORKER))
        async with AsyncLighthouseClient(site.at(client_files)) as client, client.session() as session:
            session.send(Hello(Participant("a", "1"), secret=SECRET))
            assert isinstance(await anext(session), Welcome)
            before = site.serial(lighthouse.http_port)

            # A pair that does not fit changes nothing, and is told.
            site.server.key.write_bytes(site.pki.issue("stray", *SERVER).key.read_bytes())
            lighthouse.wait_for_log("keeping the previous certificates: .*server.pem with the key")
            with LighthouseClient(site.at(client_files)) as another:
                another.status()

            # The server's certificate, and the CA of its clients; the first CA's clients get in no more.
            second = Pki(tmp_path, "second")
            site.pki.issue("server", *SERVER)
            site.client_ca.write_bytes(second.ca.read_bytes())
            newcomer = replace(site.pki.files(second.issue("newcomer", WORKER)), ca=str(site.pki.ca))
            eventually(lambda: _gets_in(site.at(newcomer)), "the new CA's client gets in")
            assert not _gets_in(site.at(client_files))
            eventually(lambda: site.serial(lighthouse.http_port) != before, "HTTPS has it, too")

            # A line that is taken away.
            site.identities.write_text('"prometheus.example.org" = { role = "view" }\n')
            eventually(lambda: not _gets_in(site.at(newcomer)), "its line is gone")
            site.identities.write_text("no TOML")
            lighthouse.wait_for_log("keeping the previous identities: --tls-identities: is not TOML")

            # And given back: the connection is the first one, and so is the session on it.
            site.identities.write_text(IDENTITIES)
            eventually(lambda: _gets_in(site.at(newcomer)), "its line is back")
            assert session.is_open
            assert await client.invoke(rpcs.is_serving(timeout_s=60)), "over the first certificate's connection"
            status = await client.status(timeout_s=60)
            assert "a" in [member.replica_id for member in status.jobs[0].members]


def _gets_in(coordinator: Coordinator) -> bool:
    try:
        with LighthouseClient(coordinator) as client:
            client.heartbeat("z", timeout_s=20)
    except (NotPermitted, Unreachable):
        return False
    return True


def test_a_client_shows_what_its_files_hold_now(site: Site) -> None:
    pair = site.pki.issue("renewed", WORKER, begins=-9 * DAY, lasts=DAY)
    with LighthouseClient(site.at(site.pki.files(pair))) as client:
        with pytest.raises(Unreachable, match="has expired"):
            client.heartbeat("a", timeout_s=20)
        site.pki.issue("renewed", WORKER)
        client.heartbeat("a", timeout_s=60)


def test_without_client_certificates_a_token_is_asked_for(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    server = pki.issue("server", *SERVER)
    with Lighthouse("--tls-cert", str(server.cert), "--tls-key", str(server.key),
                    "--credentials", str(tmp_path / "c")) as lighthouse:  # fmt: skip
        token = Tokens.read(tmp_path / "c").newest(Role.JOIN)
        string = f"lighthouse://tls.{token}@localhost:{lighthouse.port}"
        plain = parse_coordinator(f"localhost:{lighthouse.port}").with_files(pki.files())
        with LighthouseClient(plain.with_token(token)) as client:
            client.heartbeat("a")
        said = run_cli(LIGHTHOUSE_CODE, "kill", "a", "--lighthouse", string)
        assert "--tls-ca: is missing" in said.stderr
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["tokens.json"]
