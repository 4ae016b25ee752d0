"""Reinforcement learning: environments, rewards, rollouts, and GRPO."""
