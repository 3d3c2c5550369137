"""Train a small ResNet on handwritten digits with Hugging Face's Trainer, in any number of replica groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --master-port 29601 train_transformers.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --master-port 29602 train_transformers.py

Kill one group, and the other continues. Start it again, and it heals and takes part again.
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import (
    PrinterCallback,
    ResNetConfig,
    ResNetForImageClassification,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from agent_client import Agent
from agent_client.integrations.transformers import FaultTolerantTrainer
from digits import Events, bits_of, digits, make_parser, state_of
from progress_bar import ProgressBar


class Shown(TrainerCallback):
    """Updates the example's progress bar, which replaces the trainer's own log lines."""

    def __init__(self, progress: ProgressBar, agent: Agent) -> None:
        self.progress, self.agent = progress, agent

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.progress.show(state.global_step, self.agent.num_participants, logs["loss"])


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images).view(-1, 1, 8, 8), "labels": torch.stack(labels)}


def main() -> None:
    parser = make_parser(__doc__, steps=200)
    parser.add_argument("--output", default=None, help="folder of this group's checkpoints; default: a new folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    sizes: dict[str, Any] = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, layer_type="basic", **sizes))

    training = TrainingArguments(
        output_dir=args.output or tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        logging_steps=5,
        data_seed=args.seed,
    )
    data = TensorDataset(images, labels)
    trainer = FaultTolerantTrainer(model=model, args=training, train_dataset=data, data_collator=collate)

    agent, optimizer, events = trainer.make_agent(), trainer.optimizer, Events(args.events)
    events.follow(agent, lambda: state_of(model, optimizer), args.pace)
    trainer.remove_callback(PrinterCallback)
    with ProgressBar(args.steps) as progress:
        trainer.add_callback(Shown(progress, agent))
        trainer.train()

    model.eval()
    with torch.no_grad():
        found = model(pixel_values=test_images.view(-1, 1, 8, 8)).logits.argmax(1)
    reached = float((found == test_labels).float().mean())
    events.log(finished=agent.current_step, accuracy=reached, hash=bits_of(state_of(model, optimizer)))
    print(f"step {agent.current_step}: test accuracy {reached:.1%}", flush=True)
    agent.close()


if __name__ == "__main__":
    main()
