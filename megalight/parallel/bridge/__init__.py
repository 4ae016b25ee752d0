"""A bridge between two models on disjoint meshes: it sends activations forward and their gradients back."""

from megalight.parallel.bridge.communicator import BridgeCommunicator

__all__ = ["BridgeCommunicator"]
