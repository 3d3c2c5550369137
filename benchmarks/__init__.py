"""Benchmarks that run our daemons and torchft's released ones side by side."""

import os

# Measured processes start with compiled code, like an installed program.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
