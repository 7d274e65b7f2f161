"""The backbone: all of a model but its routed experts, and the dispatcher that lets a swarm compute those."""
