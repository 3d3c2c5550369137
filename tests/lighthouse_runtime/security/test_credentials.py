"""Credentials: made once, renewed by the same CA before they expire, and refused where others could read them."""

import datetime
import os
from pathlib import Path

import pytest

from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.security import certificates
from lighthouse_runtime.security.credentials import CertificateFiles, Tokens, load_or_make, pin_of, read_pin


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


def test_what_was_cut_short_is_made_again_or_refused(tmp_path: Path) -> None:
    made = load_or_make(tmp_path / "c", ())
    made.certificate.unlink()
    assert load_or_make(tmp_path / "c", ()).certificate.exists()
    (tmp_path / "c" / "ca.pem").write_text("no certificate")
    with pytest.raises(InvalidRequest, match="--credentials: "):
        load_or_make(tmp_path / "c", ())
    assert len(pin_of(certificates.make_ca()[1])) == 64
    assert len(Tokens.read(tmp_path / "c").all()) == 3
