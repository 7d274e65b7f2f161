"""Ways to a node: the relay now, direct paths later, behind one interface."""
