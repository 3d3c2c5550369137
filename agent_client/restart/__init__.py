"""In-process restart: when any rank in a run fails, the processes run their function again without exiting."""
