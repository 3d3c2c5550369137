"""Rules that both ends apply: stall verdicts, their wording, when a wait is reported."""
