"""Reinforcement learning with TRL's GRPO and paceline as the rollout engine: exact samples with log-probabilities.

See docs/how-to/rl.md.

    from paceline.loop.rl.rollouts import Rollouts, RolloutConfig
    from paceline.loop.rl.with_trl import rollout_func

    rollouts = Rollouts(LLM("folder", dtype="float32"), RolloutConfig(seed=1))
    GRPOTrainer(..., rollout_func=rollout_func(rollouts))

For multi-turn agents, `endpoint.py` serves the policy, `agents.py` runs groups of attempts, `judge.py` ranks them.
"""
