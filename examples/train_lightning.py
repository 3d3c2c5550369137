"""Train a small network on handwritten digits with Lightning's Trainer, in any number of replica groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --master-port 29601 train_lightning.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --master-port 29602 train_lightning.py

Kill one group, and the other continues. Start it again, and it heals and takes part again.
"""

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agent_client.integrations.lightning import FaultTolerantStrategy
from digits import Events, accuracy, bits_of, digits, make_parser, network, state_of
from progress_bar import ProgressBar


class Classifier(lightning.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net = network()
        self.steps = steps

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=1e-2)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.steps)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


class Watched(lightning.Callback):
    """Updates the example's progress bar and log. Fault tolerance does not need it."""

    def __init__(self, strategy: FaultTolerantStrategy, events: Events, progress: ProgressBar, pace_s: float) -> None:
        self.strategy, self.events, self.progress, self.pace_s = strategy, events, progress, pace_s

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert self.strategy.agent is not None
        self.events.follow(self.strategy.agent, lambda: state_of(pl_module, trainer.optimizers[0]), self.pace_s)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any, **__: Any) -> None:
        assert self.strategy.agent is not None
        self.progress.show(trainer.global_step, self.strategy.agent.num_participants, trainer.callback_metrics["loss"])


def main() -> None:
    args = make_parser(__doc__, steps=200).parse_args()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    loader = DataLoader(TensorDataset(images, labels), args.batch_size, shuffle=True, num_workers=1)
    module, events, progress = Classifier(args.steps), Events(args.events), ProgressBar(args.steps)

    strategy = FaultTolerantStrategy(data_seed=args.seed)
    trainer = lightning.Trainer(
        strategy=strategy,
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[Watched(strategy, events, progress, args.pace)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with progress:
        trainer.fit(module, loader)

    agent = strategy.agent
    assert agent is not None
    reached = accuracy(module.net.eval(), test_images, test_labels)
    bits = bits_of(state_of(module, trainer.optimizers[0]))
    events.log(finished=trainer.global_step, accuracy=reached, hash=bits)
    print(f"step {trainer.global_step}: test accuracy {reached:.1%}", flush=True)
    agent.close()


if __name__ == "__main__":
    main()
