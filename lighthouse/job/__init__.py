"""One job: its replica groups, its runs, its quorum and its incidents."""
