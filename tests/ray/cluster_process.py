"""Three raylets on one machine, in a separate process, so that the tests' own Ray does not see them.

Prints the address when the nodes are up. For every line on stdin it adds a node, kills the previously newest one
as a power cut would, and prints a line. At the end of stdin it kills the rest.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        nodes.insert(0, cluster.add_node(num_cpus=1))
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


main()
