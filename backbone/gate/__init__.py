"""The onboarding gate: how close the swarm is to llama.cpp, beside how close llama.cpp is to itself."""
