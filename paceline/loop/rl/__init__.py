"""Reinforcement learning by TRL's GRPO with paceline as the rollout engine: exact samples with log-probabilities.

docs/how-to/rl.md has the whole of it.

    from paceline.loop.rl.rollouts import Rollouts, RolloutConfig
    from paceline.loop.rl.with_trl import rollout_func

    rollouts = Rollouts(LLM("folder", dtype="float32"), RolloutConfig(seed=1))
    GRPOTrainer(..., rollout_func=rollout_func(rollouts))

Agents of several turns: `endpoint.py` serves the policy to them, `agents.py` gathers groups of attempts, `judge.py` ranks them.
"""
