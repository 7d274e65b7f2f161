"""The onboarding gate: how close the swarm's logits are to llama.cpp's, beside how close llama.cpp is to itself."""
