"""The replica groups that are present: roster, admission, reachability, the grid of ranks."""
