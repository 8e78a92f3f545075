"""Planning: the memory and the devices that a run needs, and its placement on a cluster."""
