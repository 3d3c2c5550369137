"""Where a job's records are kept, and which of two lighthouses may write them."""
