"""The guard process, which starts the ranks for a supervisor, reads their output and kills their process trees."""
