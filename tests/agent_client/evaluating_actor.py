"""A rank that evaluates when a test says so, and says how it ended."""

import threading
from typing import Any

import torch

from agent_client.errors import AgentError, EvaluationFailed, EvaluationInterrupted
from tests.agent_client.actors import AgentActor


class EvaluatingActor(AgentActor):
    def __init__(self) -> None:
        super().__init__()
        self.evaluated = 0
        self.is_evaluating = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def hold(self) -> None:
        self.may_end.clear()

    def let_end(self) -> None:
        self.may_end.set()

    def wait_evaluating(self) -> None:
        assert self.is_evaluating.wait(60.0)

    def evaluate(self, *, error: str = "", returns: Any = None, **options: Any) -> dict[str, Any]:
        def metrics() -> dict[str, Any]:
            self.evaluated += 1
            self.is_evaluating.set()
            self.may_end.wait()
            if error:
                raise ValueError(error)
            if returns is not None:
                return returns
            return {"accuracy": 15.23, "by_class": torch.arange(3.0), "nested": [(1, "a"), None]}

        return self._ended(lambda: self.agent.evaluate_on_rank0(metrics, **options))

    def load(self, step: int) -> None:
        """As from a checkpoint that was saved under quorum 1."""
        self.agent.load_state_dict({"step": step, "tag_quorum_id": 1, "batches_committed": step})

    def check_equal(self, value: object) -> dict[str, Any]:
        return self._ended(lambda: self.agent.check_equal("batches per epoch", value))

    def _ended(self, act: Any) -> dict[str, Any]:
        try:
            result = act()
        except (AgentError, EvaluationFailed, EvaluationInterrupted, TypeError, ValueError) as e:
            return {"raised": type(e).__name__, "text": str(e), "evaluated": self.evaluated}
        return {"result": repr(result), "evaluated": self.evaluated}
