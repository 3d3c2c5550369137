"""In-process restart: when a rank in a run fails, the other processes run their function again without exiting."""
