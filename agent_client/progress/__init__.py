"""Progress of a rank: phases, waits and collectives, with evidence when it hangs."""
