"""One job: its replica groups, its quorum, its runs and its incidents.

`QuorumMachine` (forming.py) and `RunMachine` (restarts.py) are pure state machines: given an event and the current
time, they return effects. `JobDriver` and `RunDriver` feed them events and perform the effects. records.py defines the
state that the machines hold and the records of it that are stored.
"""
