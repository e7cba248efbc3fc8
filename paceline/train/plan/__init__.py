"""Plans a training run without loading weights: chooses the settings that are not given (the drafter's size, lengths,
number of prompts, steps), and predicts its time by stage, memory and disk."""
