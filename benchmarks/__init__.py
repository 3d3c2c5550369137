"""Our daemons and torchft's released ones side by side, in one run."""
