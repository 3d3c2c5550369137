"""Program of the store process, which hosts the group's TCPStore so that the store outlives the ranks.

It is run as a file by the interpreter in --store-python, with two arguments: the port (0 for any) and the listen
address (empty for all). It prints `store PORT` once it serves, and serves until its standard input closes or its parent
exits. It is the only code of the daemons that imports torch, and it imports no other code of this project.
"""

import ctypes
import os
import signal
import socket
import sys


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    # A scheduler may signal all processes of a job, but a draining group needs its store until the end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        from torch.distributed import TCPStore
    except ImportError as e:
        print(f"no torch in {sys.executable}: {e}", flush=True)
        sys.exit(3)
    port, host = int(sys.argv[1]), sys.argv[2]
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as e:
            sys.exit(f"cannot listen on {host}:{port} (--store-port): {os.strerror(e.errno or 0)}")
        port, descriptor = listening.getsockname()[1], listening.detach()
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    else:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"store {store.port}", flush=True)
    while os.read(0, 4096):
        pass
    os._exit(0)  # torch's teardown takes 0.6 s, several times that on a busy host, and saves nothing


if __name__ == "__main__":
    main()
