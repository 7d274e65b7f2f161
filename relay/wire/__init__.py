"""The bytes everybody shares: frames, messages, tensors and session machines. Pure; see PROTOCOL.md."""
