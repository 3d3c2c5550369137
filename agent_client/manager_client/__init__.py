"""Connection of a rank to its group's manager: requests, votes and the watch."""
