"""Kernels run in Triton's interpreter here: the switch must be set before any of them is decorated.

torch.compile compiles in this process: its pool would stay beside the children that tests of isolation count.
"""

import os

from postgres_server import own_server, server_url, shared_server

__all__ = ["own_server", "server_url", "shared_server"]

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
