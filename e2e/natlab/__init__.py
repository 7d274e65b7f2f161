"""Two hosts behind two NATs and a relay, in network namespaces of this machine."""
