"""Train a small network on handwritten digits with DiLoCo: replica groups that communicate once in 20 steps.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a python train_diloco.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b python train_diloco.py

Kill one group, and the other continues. Start it again, and it heals at the next outer step.
"""

import time

import torch
from torch import nn

from agent_client import Agent, DiLoCo, GroupDrained, StepSampler, TrainState
from digits import Events, accuracy, bits_of, digits, log_like_the_daemons, make_parser
from progress_bar import ProgressBar


def main() -> None:
    parser = make_parser(__doc__, steps=60)
    parser.add_argument(
        "--sync-every", type=int, default=20, help="inner steps between two synchronisations of a parameter"
    )
    parser.add_argument("--fragments", type=int, default=2, help="parts of the model, which are synchronised in turn")
    parser.add_argument("--delay", type=int, default=1, help="inner steps that overlap with the communication")
    args = parser.parse_args()
    log_like_the_daemons()

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    agent = Agent.from_env(state=TrainState(model, inner))
    optimizer = DiLoCo(
        model, inner, outer, agent, sync_every=args.sync_every, fragments=args.fragments, delay=args.delay
    )

    events = Events(args.events)
    with ProgressBar(args.steps) as progress:
        for batch in StepSampler(len(labels), args.batch_size, optimizer, args.seed):
            if agent.current_step >= args.steps:
                break
            began_at, outer_step = time.monotonic(), agent.current_step
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            if not optimizer.step():
                events.log(discarded=agent.current_step)
            elif agent.current_step > outer_step:
                bits = bits_of(optimizer.global_parameters)
                events.committed(agent, loss, bits, inner_step=optimizer.current_step)
                progress.show(agent.current_step, agent.num_participants, loss)
            time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    for parameter, tensor in zip(model.parameters(), optimizer.global_parameters, strict=True):
        parameter.data.copy_(tensor)
    reached, bits = accuracy(model, test_images, test_labels), bits_of(optimizer.global_parameters)
    events.log(finished=agent.current_step, accuracy=reached, hash=bits)
    print(f"outer step {agent.current_step}: test accuracy {reached:.1%}, weights {bits[:16]}", flush=True)
    agent.close()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
