"""The deadline timer, and what a late loop does to it."""
