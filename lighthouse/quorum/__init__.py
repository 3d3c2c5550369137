"""One job: which groups train together, and what its sessions are told."""
