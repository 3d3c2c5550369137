"""Progress of a rank: phases, waits, collectives, and diagnostics of hangs."""
