"""Certificates and tokens: made, renewed, read again when a file changes, and refused where others could read them."""

import datetime
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.process import files
from lighthouse_runtime.security import certificates
from lighthouse_runtime.security.credentials import (
    FILE,
    ROLES,
    CertificateFiles,
    TokenFile,
    Tokens,
    load_or_make,
    pin_of,
    read_pin,
    token_name,
)


def test_a_second_start_uses_what_the_first_has_made(tmp_path: Path) -> None:
    first = load_or_make(tmp_path / "c", ("localhost",))
    made = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    second = load_or_make(tmp_path / "c", ("localhost",))
    assert (first.is_new, second.is_new, first.ca_pin) == (True, False, second.ca_pin)
    assert {path.name: path.read_bytes() for path in second.folder.iterdir()} == made


def test_a_certificate_is_made_anew_by_the_same_ca_before_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "SERVER_LASTS", datetime.timedelta(days=29))
        first = load_or_make(tmp_path / "c", ("localhost",))
        old = first.certificate.read_bytes()
    files = CertificateFiles(first.certificate, first.key)
    files.for_http()
    assert files._fetch() is None, "nothing has changed"
    second = load_or_make(tmp_path / "c", ("localhost",))
    assert second.certificate.read_bytes() != old
    assert second.ca_pin == first.ca_pin == read_pin(first.folder)
    assert files._fetch() is not None, "gRPC takes it at the next handshake"
    (second.folder / "ca.key").unlink()
    assert load_or_make(tmp_path / "c", ()).ca_pin == first.ca_pin, "without the CA's key it serves on"


def test_a_certificate_made_while_the_clock_was_ahead_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_or_make(tmp_path / "c", ("localhost",))
    first.certificate.unlink()
    years = datetime.timedelta(days=2 * 365)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "CLOCKS_DIFFER", -years)  # begins then
        patched.setattr(certificates, "SERVER_LASTS", 2 * years)
        load_or_make(tmp_path / "c", ("localhost",))
        ahead = first.certificate.read_bytes()
    assert load_or_make(tmp_path / "c", ("localhost",)).ca_pin == first.ca_pin
    made = first.certificate.read_bytes()
    assert made != ahead
    load_or_make(tmp_path / "c", ("localhost",))
    assert first.certificate.read_bytes() == made
    assert caplog.messages == []


@pytest.mark.parametrize("lasts", [datetime.timedelta(hours=-1), datetime.timedelta(days=9)])
def test_a_ca_that_is_not_valid_is_logged_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lasts: datetime.timedelta
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "CLOCKS_DIFFER", -lasts / 2 if lasts > datetime.timedelta() else -2 * lasts)
        patched.setattr(certificates, "CA_LASTS", lasts)
        load_or_make(tmp_path / "c", ("localhost",))
    assert "the clock" in caplog.text
    assert "remove" in caplog.text


def encrypt(key: Path) -> None:
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    form, cipher = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"passphrase")
    key.write_bytes(plain.private_bytes(serialization.Encoding.PEM, form, cipher))


def test_a_key_with_a_passphrase_is_an_error_instead_of_a_prompt(tmp_path: Path) -> None:
    """A prompt on the terminal would block every handshake."""
    credentials = load_or_make(tmp_path / "c", ("localhost",))
    files = CertificateFiles(credentials.certificate, credentials.key)
    encrypt(credentials.key)
    files.reload_if_changed()
    assert "the key is encrypted: remove its passphrase" in files.error
    encrypt(tmp_path / "c" / "ca.key")
    credentials.certificate.unlink()
    with pytest.raises(InvalidRequest, match=r"--credentials: .* ca.key cannot be used: .* is encrypted"):
        load_or_make(tmp_path / "c", ("localhost",))


def test_a_folder_that_is_not_its_own_is_refused_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match=r"--credentials: .* has files and no ca.pem"):
        load_or_make(tmp_path / "a", ())
    (tmp_path / "b").mkdir()
    os.chmod(tmp_path / "b", 0o755)
    with pytest.raises(InvalidRequest, match=r"others may read it \(mode 755\): chmod 700"):
        load_or_make(tmp_path / "b", ())
    (tmp_path / "f").write_text("")
    with pytest.raises(InvalidRequest, match="--credentials: cannot use"):
        load_or_make(tmp_path / "f", ())


class Killed(BaseException): ...


@pytest.mark.parametrize("file", [FILE, "ca.key", "ca.pem", "server.key", "server.pem"])
def test_a_first_start_that_was_killed_is_completed_by_the_next(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(new: Path, path: Path) -> None:
        if path.name == file:
            raise Killed
        new.rename(path)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", replace)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # a process that is killed cleans nothing up
        with pytest.raises(Killed):
            load_or_make(tmp_path / "c", ())
    made = load_or_make(tmp_path / "c", ())
    CertificateFiles(made.certificate, made.key).for_http()
    assert read_pin(made.folder) == made.ca_pin
    assert len(Tokens.read(made.folder).all()) == len(ROLES)


def test_what_was_cut_short_is_made_again_or_refused(tmp_path: Path) -> None:
    made = load_or_make(tmp_path / "c", ())
    made.certificate.unlink()
    assert load_or_make(tmp_path / "c", ()).certificate.exists()
    (tmp_path / "c" / "ca.pem").write_text("no certificate")
    with pytest.raises(InvalidRequest, match="--credentials: "):
        load_or_make(tmp_path / "c", ())
    assert len(pin_of(certificates.make_ca()[1])) == 64
    assert len(Tokens.read(tmp_path / "c").all()) == len(ROLES)


def test_the_newest_two_are_valid() -> None:
    first = Tokens.make()
    second = first.rotated(Role.JOIN)
    third = second.rotated(Role.JOIN)
    for tokens in (first, second):
        assert second.principal(tokens.newest(Role.JOIN)).roles == {Role.JOIN}
    with pytest.raises(NotPermitted, match="rotated away"):
        third.principal(first.newest(Role.JOIN))
    with pytest.raises(NotPermitted, match="run `lighthouse token join --port 29599` on its host"):
        third.principal(first.newest(Role.JOIN), 29599)
    with pytest.raises(NotPermitted, match="run `lighthouse token` on its host"):
        third.principal("no token of ours")
    assert third.newest(Role.OPERATE) == first.newest(Role.OPERATE), "one role's rotation is no other's"


def test_a_folder_of_an_earlier_version_has_no_token_of_chaos(tmp_path: Path) -> None:
    Tokens({role: tokens for role, tokens in Tokens.make().by_role.items() if role is not Role.CHAOS}).write(tmp_path)
    tokens = Tokens.read(tmp_path)
    with pytest.raises(InvalidRequest, match="`lighthouse token rotate chaos` creates one"):
        tokens.newest(Role.CHAOS)
    rotated = tokens.rotated(Role.CHAOS)
    assert rotated.principal(rotated.newest(Role.CHAOS)).roles == {Role.CHAOS}


@pytest.mark.parametrize("role", ROLES)
def test_a_token_is_of_its_role_and_its_name_does_not_show_it(role: Role) -> None:
    tokens = Tokens.make()
    principal = tokens.principal(tokens.newest(role))
    assert (principal.roles, principal.name) == ({role}, token_name(role, tokens.newest(role)))
    assert tokens.newest(role)[4:10] not in principal.name
    for wrong in ("", tokens.newest(role)[:-1], tokens.newest(role) + "x", "schlüssel"):
        with pytest.raises(NotPermitted):
            tokens.principal(wrong)


def test_a_file_that_changes_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECKED_EVERY_S", 0.0)
    first = Tokens.make()
    first.write(tmp_path)
    file = TokenFile(tmp_path)
    second = first.rotated(Role.VIEW)
    second.write(tmp_path)
    assert file.value.by_role == second.by_role
    (tmp_path / FILE).write_text("{")
    assert file.value.by_role == second.by_role
    assert "cannot read" in file.error
    first.write(tmp_path)
    assert (file.value.by_role, file.error) == (first.by_role, "")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"join": [], "operate": ["x"], "view": ["x"]}'])
def test_a_file_without_tokens_is_refused_with_the_option(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(InvalidRequest, match="^--credentials: "):
        Tokens.read(tmp_path)
