"""Kernels run in Triton's interpreter here: the switch must be set before any of them is decorated."""

import os

from postgres_server import own_server, server_url, shared_server

__all__ = ["own_server", "server_url", "shared_server"]

os.environ.setdefault("TRITON_INTERPRET", "1")
