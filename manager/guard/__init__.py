"""The guard process between a supervisor and its ranks: starts them, reads their output, kills their process trees."""
