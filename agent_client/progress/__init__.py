"""A rank's progress (phases, waits and collectives), and evidence of what it is doing when it hangs."""
