"""One rank that trains with a library and tells what that library counts in epochs:
counting_script.py LIBRARY --accumulate A [--constant SIZE] [--patience P] --steps N --pace S --events FILE.

Of each sample some tokens have no label: only the HF Trainer knows of them, and divides by the number of those that
have one. The others leave them out of no mean. With a patience the HF Trainer stops early: it takes the highest loss
for the best, so that of its first evaluation.
"""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from examples.digits import Events, make_parser

EVALUATED_EVERY = 3
SAMPLES, TOKENS, BATCH_SIZE, RATE = 24, 5, 2, 0.5
INPUTS = torch.randn(SAMPLES, TOKENS, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
LABELS = torch.randint(4, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(8))
IS_LABELLED = torch.arange(TOKENS) <= torch.randint(TOKENS, (SAMPLES, 1), generator=torch.Generator().manual_seed(9))


class Data(Dataset[dict[str, Tensor]]):
    def __init__(self, *, has_gaps: bool) -> None:
        self.labels = LABELS.where(IS_LABELLED, -100) if has_gaps else LABELS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": INPUTS[index], "labels": self.labels[index]}


class Net(nn.Module):
    accepts_loss_kwargs = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits, labels = self.layers(x).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels)}
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


def transformers(net: Net, options: dict[str, Any], args: Any, events: Events) -> Any:
    library, ours = map(importlib.import_module, ("transformers", "agent_client.integrations.transformers"))

    class Tells(library.TrainerCallback):
        def tell(self, what: str, state: Any) -> None:
            events.log(**{what: state.global_step}, epoch=state.epoch)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tell("validated", state)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tell("saved", state)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                self.tell("logged", state)

    callbacks: list[Any] = [Tells()]
    strategies: dict[str, Any] = dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "epoch")
    if args.patience:
        callbacks.append(library.EarlyStoppingCallback(args.patience))
        every = dict.fromkeys(("save_steps", "eval_steps", "logging_steps"), EVALUATED_EVERY)
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        strategies = dict.fromkeys(strategies, "steps") | every | best
    training = library.TrainingArguments(
        output_dir=str(args.events.with_suffix("")),
        max_steps=args.steps,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=RATE / 10 if args.patience else RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        data_seed=0,
        **strategies,
    )
    data = Data(has_gaps=True)
    trainer = ours.FaultTolerantTrainer(
        model=net, args=training, train_dataset=data, eval_dataset=data, callbacks=callbacks, agent_options=options
    )
    events.follow(trainer.make_agent(), net.parameters, args.pace)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint or "").name
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    events.log(stopped=trainer.state.global_step, best=best, evaluated=evaluated)
    return trainer.agent


def lightning(net: Net, options: dict[str, Any], args: Any, events: Events) -> Any:
    library, ours = map(importlib.import_module, ("lightning", "agent_client.integrations.lightning"))

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation", self.net(**batch)["loss"])

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                events.log(validated=self.trainer.global_step, epoch=self.trainer.current_epoch)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            events.log(saved=checkpoint["global_step"], epoch=checkpoint["epoch"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=RATE)

    strategy = ours.FaultTolerantStrategy("cpu", agent_options=options)
    trainer = library.Trainer(
        strategy=strategy,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        default_root_dir=args.events.with_suffix(""),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Data(has_gaps=False)
    trainer.fit(Module(), DataLoader(data, BATCH_SIZE), DataLoader(data, BATCH_SIZE))
    return strategy.agent


def accelerate(net: Net, options: dict[str, Any], args: Any, events: Events) -> Any:
    ours = importlib.import_module("agent_client.integrations.accelerate")
    accelerator = ours.FaultTolerantAccelerator(
        max_steps=args.steps, cpu=True, gradient_accumulation_steps=args.accumulate, agent_options=options
    )
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(net, sgd, DataLoader(Data(has_gaps=False), BATCH_SIZE))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.agent


def main() -> None:
    parser = make_parser(None, steps=0)
    parser.add_argument("library", choices=["transformers", "lightning", "accelerate"])
    parser.add_argument("--accumulate", type=int)
    parser.add_argument("--constant", type=int, default=0)
    parser.add_argument("--patience", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"world_size_mode": "constant_batch", "world_size": args.constant} if args.constant else {}
    net, events = Net(), Events(args.events)
    agent = globals()[args.library](net, options, args, events)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    events.log(finished=agent.current_step, weights=weights.tolist(), data=agent.data_report())
    agent.close()


if __name__ == "__main__":
    main()
