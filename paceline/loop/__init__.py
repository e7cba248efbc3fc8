"""Everything built around the core: record, evaluate, adapt, distill, learn from rewards.

It imports the core and is never imported by it.
"""
