"""The coordinator of the replicas: it gives each request to one of them.

python examples/replicas/coordinator.py ENDPOINT   # ipc:///run/user/1000/engines
"""

from __future__ import annotations

import sys

from megalight.serving.coordinator import DataParallelInferenceCoordinator

if __name__ == "__main__":
    DataParallelInferenceCoordinator(sys.argv[1]).run()  # until a client stops all
