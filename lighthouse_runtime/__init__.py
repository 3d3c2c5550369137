"""What any process of ours needs: loop, sockets, logs, clients. No torch."""
