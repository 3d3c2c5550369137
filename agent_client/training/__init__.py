"""Classes for training scripts: DDP, HSDP, LocalSGD, DiLoCo, optimizer, scheduler, samplers and checkpoints."""
