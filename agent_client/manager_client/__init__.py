"""A rank's connection to its group's manager: requests, votes and the watch stream."""
