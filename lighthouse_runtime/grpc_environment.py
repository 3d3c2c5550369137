"""To be imported before grpc, by a process that serves: gRPC reads its environment when it is loaded.

Without the event engine's listener a message reaches the loop over one thread less: two thirds of the CPU for each.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
