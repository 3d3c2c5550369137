"""A worker that reduces a gradient like plain DDP and prints when each step ends. Uses torch only."""

import time

import torch
import torch.distributed as dist

STEP_S = 0.02


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    gradient = torch.ones(1)
    while True:
        dist.all_reduce(gradient)
        gradient /= size
        print(f"step {time.monotonic():.6f} {size}", flush=True)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
