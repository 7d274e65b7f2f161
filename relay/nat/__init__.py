"""NAT: how a peer looks from outside, and which pairs of peers can reach each other directly."""
