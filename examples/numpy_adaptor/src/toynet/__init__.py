"""
A toy framework: a network of numpy arrays, trained by several processes. It knows nothing of tft.

    toynet.join(name, host, port, rank, world)     form the group of this process
    network = toynet.Network(...)
    replica = toynet.Replicated(network)
    loss, gradients = replica.gradients(inputs, targets)
    gradients = replica.average(gradients)         over the group: one all-reduce
    toynet.Momentum(network.parameters).step(gradients)
"""

from toynet.group import Broken, Group, all_reduce, join, leave
from toynet.network import Arrays, Momentum, Network, Replicated
from toynet.rendezvous import Rendezvous

__all__ = [
    "Arrays",
    "Broken",
    "Group",
    "Momentum",
    "Network",
    "Rendezvous",
    "Replicated",
    "all_reduce",
    "join",
    "leave",
]
