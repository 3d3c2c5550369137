"""One job: its replica groups, its quorum, its runs and its incidents.

`QuorumMachine` (forming.py) and `RunMachine` (restarts.py) are pure: events go in, effects come out, and time is an
argument. `JobDriver` and `RunDriver` feed them and perform the effects. records.py holds the records that they change.
"""
