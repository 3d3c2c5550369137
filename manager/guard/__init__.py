"""The process between supervisor and ranks: it forks them, reads their output and reaps their trees."""
