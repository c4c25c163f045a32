"""Rollout: vLLM engines as Ray actors, and how they get the policy's weights."""
