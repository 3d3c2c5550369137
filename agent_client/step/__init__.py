"""Training steps (quorum, collectives and vote), and the Agent, the interface for training scripts."""
