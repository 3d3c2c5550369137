"""Connection of a rank to the manager of its group: requests, votes and watch."""
