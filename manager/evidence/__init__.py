"""What the processes of ranks show from outside."""
