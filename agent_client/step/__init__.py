"""Training steps: quorum, collectives and vote, with the Agent that a script uses."""
