"""What a training script uses: DDP, HSDP, LocalSGD, DiLoCo, the optimizer, samplers, schedulers."""
