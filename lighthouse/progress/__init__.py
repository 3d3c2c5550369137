"""Where each rank of a job is, and what failures have cost it: steps, discards, heals, goodput."""
