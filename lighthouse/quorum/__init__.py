"""One job: who trains together, and what its sessions are told."""
