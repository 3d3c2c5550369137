"""One rank that trains with a library, which writes its own checkpoint after K steps, and goes on from it where there
is one: resuming_script.py LIBRARY --save-at K --steps N --pace S --events FILE."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.digits import Events, make_parser, network, state_of

IMAGES = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (64,), generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(IMAGES, LABELS)


class Net(nn.Module):
    """BatchNorm, and a loss as the HF Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(images), labels)}


def optimizer_of(net: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 2 * steps)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def transformers(net: Net, saved: Path, args: Any, events: Events) -> Any:
    library, ours = map(importlib.import_module, ("transformers", "agent_client.integrations.transformers"))

    class Saves(library.TrainerCallback):
        def on_step_end(self, asked: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == args.save_at

    training = library.TrainingArguments(
        output_dir=str(saved),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
    )
    trainer = ours.FaultTolerantTrainer(
        model=net, args=training, train_dataset=DATA, data_collator=collate, callbacks=[Saves()]
    )
    agent, optimizer = trainer.make_agent(), trainer.optimizer
    events.follow(agent, lambda: state_of(net, optimizer), args.pace)
    trainer.train(resume_from_checkpoint=saved.exists() and any(saved.glob("checkpoint-*")))
    return agent


def lightning(net: Net, saved: Path, args: Any, events: Events) -> Any:
    library, ours = map(importlib.import_module, ("lightning", "agent_client.integrations.lightning"))

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            adam, decay = optimizer_of(self.net, args.steps)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    class Saves(library.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            events.follow(strategy.agent, lambda: state_of(net, trainer.optimizers[0]), args.pace)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == args.save_at:
                trainer.save_checkpoint(saved)

    strategy = ours.FaultTolerantStrategy("cpu")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = library.Trainer(strategy=strategy, max_steps=args.steps, callbacks=[Saves()], **quiet)
    trainer.fit(Module(), DataLoader(DATA, 8), ckpt_path=saved if saved.exists() else None)
    return strategy.agent


def accelerate(net: Net, saved: Path, args: Any, events: Events) -> Any:
    ours = importlib.import_module("agent_client.integrations.accelerate")
    adam, decay = optimizer_of(net, args.steps)
    accelerator = ours.FaultTolerantAccelerator(max_steps=args.steps, cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(net, adam, DataLoader(DATA, 8), decay)
    events.follow(accelerator.agent, lambda: state_of(net, adam), args.pace)
    if saved.exists():
        accelerator.load_state(str(saved))
    for images, labels in loader:
        accelerator.backward(model(images, labels)["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if accelerator.agent.was_committed and accelerator.agent.current_step == args.save_at:
            accelerator.save_state(str(saved))
    return accelerator.agent


def main() -> None:
    parser = make_parser(None, steps=0)
    parser.add_argument("library", choices=["transformers", "lightning", "accelerate"])
    parser.add_argument("--save-at", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    saved = args.events.parent / f"{args.events.name.partition('-rank')[0]}.saved"
    agent = globals()[args.library](Net(), saved, args, Events(args.events))
    agent.close()


if __name__ == "__main__":
    main()
