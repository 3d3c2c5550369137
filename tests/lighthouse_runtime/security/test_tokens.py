"""Tokens: two at a time, told from each other by name alone, read again when their file changes."""

from pathlib import Path

import pytest

from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security import watched_file
from lighthouse_runtime.security.credentials import FILE, ROLES, TokenFile, Tokens, token_name


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
    monkeypatch.setattr(watched_file, "CHECKED_EVERY_S", 0.0)
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
