"""Kernels run in Triton's interpreter here: the switch must be set before any of them is decorated."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
