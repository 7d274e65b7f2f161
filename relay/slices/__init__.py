"""The relay's cache of slices, addressed by content: one upload by the backbone serves all nodes."""
