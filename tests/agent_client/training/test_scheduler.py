"""A scheduler whose loop drops what step() returns: it moves with committed steps, and only with these."""

from types import SimpleNamespace

import torch
from torch.optim import lr_scheduler

from agent_client.training.optimizer import FaultTolerantScheduler


def scheduler_of(agent: SimpleNamespace) -> tuple[torch.optim.Optimizer, FaultTolerantScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = FaultTolerantScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5), agent)  # type: ignore[arg-type]
    optimizer.step()
    return optimizer, scheduler


def test_it_moves_only_with_committed_steps() -> None:
    agent = SimpleNamespace(was_committed=False)
    optimizer, scheduler = scheduler_of(agent)
    for agent.was_committed, rate in [(False, 1.0), (True, 0.5), (True, 0.25), (False, 0.25), (True, 0.125)]:
        scheduler.step()
        assert scheduler.get_last_lr() == [rate] == [optimizer.param_groups[0]["lr"]]
    assert scheduler.last_epoch == scheduler.wrapped.last_epoch == 3


def test_it_is_what_libraries_take_for_a_scheduler() -> None:
    _, scheduler = scheduler_of(SimpleNamespace(was_committed=True))
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    scheduler.step()
    _, other = scheduler_of(SimpleNamespace(was_committed=True))
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 1
    assert scheduler.base_lrs == [1.0]
    assert repr(scheduler).startswith("FaultTolerantScheduler(")
    assert not hasattr(scheduler, "no_such_thing")


def test_a_plateau_scheduler_gets_its_metric() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scheduler = FaultTolerantScheduler(plateau, SimpleNamespace(was_committed=True))  # type: ignore[arg-type]
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] < 0.1
