"""Rounds of several replica groups at once, and what each rank is told."""

from collections.abc import Mapping
from typing import Any

from tests.processes import Lighthouse, eventually, http_json
from tests.torchft.stock import Stock

Answer = dict[str, Any]


def round_of(clients: Mapping[str, Stock], step: int | Mapping[str, int], ranks: int = 1, **more: Any) -> list[Answer]:
    """Every rank of every group asks; the answers of the groups in the order of `clients`, rank by rank."""
    steps = step if isinstance(step, Mapping) else dict.fromkeys(clients, step)
    asked = [
        client.ask(rank, steps[name], checkpoint_metadata=f"{name}{rank}", **more)
        for name, client in clients.items()
        for rank in range(ranks)
    ]
    return [answer.result(60) for answer in asked]


def quorum_of(answers: list[Answer]) -> tuple[int, list[str]]:
    """(quorum_id, replica ids): the one quorum that all were told of."""
    told = {(answer["quorum_id"], *answer["replica_ids"]) for answer in answers}
    assert len(told) == 1, answers
    quorum_id, *names = told.pop()
    return quorum_id, names


def members(lighthouse: Lighthouse) -> dict[str, str]:
    jobs = http_json(lighthouse.http + "/status")["jobs"]
    return {member["replica_id"]: member["state"] for job in jobs for member in job["members"]}


def wait_for_state(lighthouse: Lighthouse, name: str, state: str) -> None:
    eventually(lambda: members(lighthouse).get(name) == state, f"{name} is {state}")
