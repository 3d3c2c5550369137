"""Records a rank's progress (phases, waits and collectives), and collects evidence of what it is doing if it hangs."""
