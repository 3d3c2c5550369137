"""Our daemons and torchft's released ones side by side, in one run."""

import os

# What is measured starts as an installed program does: compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
