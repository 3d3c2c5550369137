"""Records a rank's progress (phases, waits and collectives), and collects evidence of where a hanging rank is."""
