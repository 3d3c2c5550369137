"""Timers, rate limits on this process's own work, and detection of pauses of this process."""
