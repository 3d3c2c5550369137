"""Certificates and tokens that change again and again under groups that train: no step is lost, no session ends."""

from pathlib import Path

from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security.credentials import Tokens, load_or_make
from tests.daemons.groups import training
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli

ROUNDS = 4


def test_no_step_is_lost_while_certificates_and_tokens_rotate(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    with Lighthouse(*EVERYWHERE, "--credentials", str(folder)) as lighthouse:
        joins = Secured(lighthouse, folder).coordinator(Role.JOIN)
        with training(joins.join_string(), "rotates", "ab", step_s=0.02) as groups:
            [quorum_id] = {quorum_id for group in groups for _, quorum_id in group.commits[-2:]}
            began_at = [group.commits[-1][0] for group in groups]
            for _ in range(ROUNDS):
                seen = len(groups[0].commits)
                (folder / "server.pem").unlink()
                load_or_make(folder, ("localhost",))
                for role in (Role.JOIN, Role.OPERATE, Role.VIEW):
                    said = run_cli(LIGHTHOUSE_CODE, "token", "rotate", role, "--credentials", str(folder))
                    assert said.returncode == 0, said.stderr
                eventually(lambda seen=seen: len(groups[0].commits) > seen + 20, "steps go on")
            assert joins.token not in Tokens.read(folder).all(), "the managers' own token is gone by now"
            assert [group.discards for group in groups] == [0, 0]
            for group, began in zip(groups, began_at, strict=True):
                steps = [step for step, _ in group.commits if step >= began]
                assert steps == list(range(began, began + len(steps)))
                assert {found for step, found in group.commits if step >= began} == {quorum_id}
                assert "lighthouse unreachable" not in group.manager.log()
                assert "refused by" not in group.manager.log()
