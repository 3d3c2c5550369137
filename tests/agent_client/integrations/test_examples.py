"""Each trainer's example as its readers run it, with the real library: a group is killed by SIGKILL and started again.

Whoever commits a step has the same parameters, buffers and optimizer state after it as all others, bit by bit."""

import ast
from pathlib import Path

import pytest

from examples.daemons import ROOT
from tests.agent_client.clusters import PRELOADED, Cluster, check_heals
from tests.agent_client.integrations.libraries import require
from tests.agent_client.ranks import RankServer

STEPS = 60
MAX_LINES = 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_group_heals_and_all_end_with_the_same_bits(tmp_path: Path, library: str, ranks: int) -> None:
    require(library)
    script = ROOT / "examples" / f"train_{library}.py"
    with (
        RankServer(*PRELOADED, f"agent_client.integrations.{library}") as forks,
        Cluster(
            forks, tmp_path, groups=2, ranks=ranks, pace_s=0.05, script=script, steps=STEPS, min_replicas=2
        ) as cluster,
    ):
        check_heals(cluster, STEPS, 0.5, before=5, within_s=300.0)


@pytest.mark.parametrize("script", ["transformers", "lightning", "accelerate", "ddp", "hsdp"])
def test_an_example_takes_at_most_ten_lines_of_ours(script: str) -> None:
    """Those that name what is ours, or the Agent; not those of the example's log of events."""
    tree = ast.parse((ROOT / "examples" / f"train_{script}.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").partition(".")[0] == "agent_client"]
    names = {"agent"} | {each.name for node in ours for each in node.names}
    lines = {node.lineno for node in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Expr):
            used = named_in(node.value)
        elif isinstance(node, ast.For | ast.If):
            used = named_in(node.iter if isinstance(node, ast.For) else node.test)
        else:
            continue
        if used & names and not used & {"events", "print"}:
            lines.add(node.lineno)
    assert 0 < len(lines) <= MAX_LINES


def named_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
