"""The backbone: everything of a model but its routed experts, and the dispatcher that lets the swarm compute those."""
