"""Timers, pacing, and detection of pauses of this process."""
