"""Where each rank of a job is."""
