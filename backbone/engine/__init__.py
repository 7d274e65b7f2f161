"""The border with llama.cpp: the ggml device "Swarm", the engine process, their messages."""
