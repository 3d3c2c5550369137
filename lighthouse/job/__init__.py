"""One job: its replica groups, its quorum, its runs and its incidents.

`QuorumMachine` (forming.py) and `RunMachine` (restarts.py) are pure state machines: they take events and the current
time and return effects. `JobDriver` and `RunDriver` feed them events and perform the effects. records.py defines the
records that they change.
"""
