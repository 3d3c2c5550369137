"""In-process restart: when a rank of a run fails, the other processes run their function again without exiting."""
