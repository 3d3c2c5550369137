"""Train a small network on handwritten digits with accelerate, in any number of replica groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --master-port 29601 train_accelerate.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --master-port 29602 train_accelerate.py

Kill one group, and the other continues. Start it again, and it heals and takes part again.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agent_client.integrations.accelerate import FaultTolerantAccelerator
from digits import Events, accuracy, bits_of, digits, make_parser, network, state_of
from progress_bar import ProgressBar


def main() -> None:
    args = make_parser(__doc__, steps=200).parse_args()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    loader = DataLoader(TensorDataset(images, labels), args.batch_size, shuffle=True, num_workers=1)
    net, events = network(), Events(args.events)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, args.steps)

    accelerator = FaultTolerantAccelerator(
        max_steps=args.steps, data_seed=args.seed, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    model, optimizer, loader, scheduler = accelerator.prepare(net, adam, loader, decay)

    agent = accelerator.agent
    assert agent is not None
    events.follow(agent, lambda: state_of(net, adam), args.pace)
    with ProgressBar(args.steps) as progress:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.show(agent.current_step, agent.num_participants, loss)

    reached, bits = accuracy(net.eval(), test_images, test_labels), bits_of(state_of(net, adam))
    events.log(finished=agent.current_step, accuracy=reached, hash=bits)
    print(f"step {agent.current_step}: test accuracy {reached:.1%}", flush=True)
    agent.close()


if __name__ == "__main__":
    main()
