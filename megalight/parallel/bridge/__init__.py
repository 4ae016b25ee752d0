"""Two models on disjoint meshes, joined: activations cross in the forward, their gradients come back."""

from megalight.parallel.bridge.communicator import BridgeCommunicator

__all__ = ["BridgeCommunicator"]
